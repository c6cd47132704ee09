"""A type for any sizes is learned where sizes do not matter, and nowhere else."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear, softmax

from placements import (
    P,
    Padded,
    PlacementError,
    R,
    S,
    V,
    assert_type,
    set_current_mesh,
    type_of,
    typecheck,
)
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


def test_sizes_that_know_their_piece_are_served_with_the_pieces(
    inferred: list[str],
) -> None:
    for n in (2, 4, 6, 8, 10):
        x = typed((n, 4), S(0))
        inferred.clear()
        y = torch.zeros(x.shape[0], 3)
        known = type_of(y)
        assert known == {"dp": S(0), "tp": R}
        assert known is not None and known.global_size(0, n) == 2 * n
        assert type_of(torch.zeros(n, 3)) == {"dp": R, "tp": R}
    assert inferred == []


# Each takes a tensor whose dims 0 and 1 may be cut, and makes views of it.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads": lambda x: x.view(x.shape[0], x.shape[1], -1, 2),
    "heads in one tuple": lambda x: x.view((*x.shape[:-1], 2, 4)),
    "rest": lambda x: x.reshape(x.shape[0], -1),
    "plain sizes": lambda x: x.reshape(*map(plain, x.shape), 1),
    "first dims in one": lambda x: x.reshape(-1, 8),
    "first size twice": lambda x: x.reshape(x.shape[0], x.shape[0], -1),
    "other order": lambda x: x.reshape(x.shape[1], x.shape[0], 8),
    "expand": lambda x: x[:, None].expand(x.shape[0], 3, x.shape[1], 8),
    "expand by the rest": lambda x: x[None].expand(3, -1, -1, -1),
    "expand a row": lambda x: x[:1].expand(x.shape[0], -1, -1),
    "repeat": lambda x: x.repeat(1, x.shape[0], 1),
    "zeros": lambda x: torch.zeros(x.shape[1], x.shape[0], 5),
    "zeros of the product": lambda x: torch.zeros(x.shape[0] * 2, plain(x.shape[1])),
}


@settings(max_examples=25)
@given(
    shapes=st.lists(st.tuples(*[st.integers(0, 5)] * 2), min_size=6, max_size=9),
    types=st.sampled_from([(R, R), (S(0), R), (S(0), S(1)), (S(1), S(0)), (S(0), V)]),
)
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_any_sizes_have_the_types_of_those_sizes(
    view: str, shapes: list[tuple[int, int]], types: tuple[AxisType, AxisType]
) -> None:
    def judged(shape: tuple[int, int], *, anew: bool) -> str:
        mesh = Mesh({"dp": 2, "tp": 2})
        with set_current_mesh(mesh):
            if anew:
                for kept in (mesh.inferred, mesh.templates):
                    kept.clear()
            x = typed((*shape, 8), *types)
            try:
                y = VIEWS[view](x)
            except (PlacementError, RuntimeError) as error:
                return type(error).__name__
            known = type_of(y)
            assert known is not None
            return f"{known} {[known.cuts(d) for d in range(y.dim())]} {known.fresh}"

    learned = [judged(shape, anew=False) for shape in (*shapes, *shapes)]
    assert learned == [judged(shape, anew=True) for shape in (*shapes, *shapes)]


def test_views_of_new_sizes_need_no_inference(inferred: list[str]) -> None:
    def attended(rows: int, length: int) -> Any:
        x = typed((rows, length, 8), S(0))
        heads = x.view(*x.shape[:-1], 2, -1).transpose(1, 2)
        rows_cut = heads[:, :, None].expand(x.shape[0], 2, 3, x.shape[1], 4)
        joined = rows_cut.reshape(x.shape[0], 6, x.shape[1], 4).transpose(1, 2)
        return type_of(joined.reshape(*x.shape[:-1], -1))

    for rows, length in ((2, 7), (9, 5), (11, 10)):
        attended(rows, length)
    inferred.clear()
    known = attended(7, 9)
    assert known == {"dp": S(0), "tp": R}
    assert (known.global_size(0, 7), known.global_size(1, 9)) == (14, 9)
    assert set(inferred) <= {"ones"}


def test_a_flow_that_asks_for_more_has_no_template() -> None:
    asked: list[str] = []

    def asks(operands: Any, sized: Any) -> Any:
        asked.append("asked")
        return operands[0].shape[0] % 2

    x = typed((4, 4), S(0))
    known = type_of(x)
    assert known is not None
    pattern = Pattern(
        known.mesh, ("a call", (identity_of(known), torch.Size((4, 4)), x.dtype))
    )
    for _ in range(3):
        pattern.learn(asks, [Operand(known, (4, 4), "float32", 0)])
    assert pattern.known() is None and asked == ["asked"]
