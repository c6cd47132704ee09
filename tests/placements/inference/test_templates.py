"""A type for any sizes is learned where sizes do not matter, and nowhere else."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, softmax

from placements import P, Padded, R, S, assert_type, set_current_mesh, type_of, typecheck
from placements.checker.call import CallInference
from placements.inference.numbers import plain
from placements.inference.templates import Pattern
from placements.inference.terms import Operand
from placements.types.axis import AxisType
from placements.types.mesh import Mesh
from placements.types.tensor import identity_of


@pytest.fixture(autouse=True)
def mesh() -> Iterator[None]:
    with set_current_mesh(Mesh({"dp": 2, "tp": 2})), typecheck():
        yield


@pytest.fixture
def inferred(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops that were inferred anew."""
    names: list[str] = []
    infer = CallInference.infer

    def noted(self: CallInference, pattern: Pattern | None = None) -> Any:
        names.append(self.call.op.name)
        return infer(self, pattern)

    monkeypatch.setattr(CallInference, "infer", noted)
    return names


def typed(shape: tuple[int, ...], dp: AxisType = R, tp: AxisType = R) -> Tensor:
    return assert_type(torch.ones(shape), {"dp": dp, "tp": tp})


def step(rows: int, length: int) -> Tensor:
    x = typed((rows, length, 8), S(0), S(1))
    y = softmax(linear(x, typed((8, 8))) * 2.0 + x, -1)
    return (y.transpose(1, 2) @ y).float()


def test_new_sizes_need_no_inference(inferred: list[str]) -> None:
    for rows, length in ((2, 3), (4, 6), (3, 7)):
        step(rows, length)
    inferred.clear()
    for rows, length in ((2, 5), (7, 3), (9, 4)):
        y = step(rows, length)
        assert type_of(y) == {"dp": S(0), "tp": P}
        known = type_of(y)
        assert known is not None and known.global_size(0, rows) == 2 * rows
    assert set(inferred) <= {"ones"}


def test_sizes_of_one_and_none_are_told_apart() -> None:
    def added(rows: int) -> Any:
        return type_of(typed((3, rows), R, S(1)) + typed((3, rows)))

    for rows in (2, 4):
        with pytest.raises(ValueError, match="one operand is cut"):
            added(rows)
    assert type_of(typed((3, 1)) + typed((3, 5), R, S(1))) == {"dp": R, "tp": S(1)}
    with pytest.raises(ValueError, match="one operand is cut"):
        added(0)


@pytest.mark.parametrize("view", [lambda x: x.view(-1, 2), lambda x: x.flatten()])
def test_views_are_inferred_by_their_sizes(view: Callable[[Tensor], Tensor]) -> None:
    for n in (2, 4, 6):
        y = view(typed((n, 4), S(0)))
        known = type_of(y)
        assert known is not None
        assert known.global_size(0, y.shape[0]) == 2 * plain(y.shape[0])


def test_uneven_pieces_keep_their_extents() -> None:
    for total in (3, 5, 7):
        x = typed(((total + 1) // 2, 4), S(0, Padded(total)))
        assert type_of(x * 2) == {"dp": S(0, Padded(total)), "tp": R}


def test_sizes_that_know_their_piece_are_never_served(inferred: list[str]) -> None:
    for n in (2, 4, 6):
        x = typed((n, 4), S(0))
        inferred.clear()
        y = torch.zeros(x.shape[0], 3)
        assert inferred == ["zeros"]
        assert type_of(y) == {"dp": S(0), "tp": R}
        known = type_of(y)
        assert known is not None and known.global_size(0, n) == 2 * n


def test_a_flow_that_asks_for_more_has_no_template() -> None:
    asked: list[str] = []

    def asks(operands: Any) -> Any:
        asked.append("asked")
        return operands[0].shape[0] % 2

    x = typed((4, 4), S(0))
    known = type_of(x)
    assert known is not None
    pattern = Pattern(known.mesh, ("a call", (identity_of(known), x.shape)))
    for _ in range(3):
        pattern.learn(asks, [Operand(known, (4, 4), "float32", 0)])
    assert pattern.known() is None and asked == ["asked"]
