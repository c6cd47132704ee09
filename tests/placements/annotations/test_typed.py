"""`On` and `@typed`: accepted and rejected values side by side, with the error's fields."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy
import pytest
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from placements import (
    Even,
    I,
    On,
    P,
    Padded,
    PlacementError,
    R,
    S,
    V,
    assert_type,
    type_of,
    typed,
)
from tests.support.checked import checked_on

Tokens = Annotated[Float[Tensor, "T D"], On(tp="t")]
Gates = Annotated[Float[Tensor, "T K"], On(tp="t")]


checked = checked_on(dp=2, tp=4)


def of(t: Any, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return assert_type(torch.zeros(shape, dtype=dtype), {"dp": R, "tp": t})


@typed
def weigh(
    x_TD: Tokens, gates_TK: Gates, scale: float = 1.0, name: str | None = None
) -> Tokens:
    return x_TD * gates_TK.sum(-1, keepdim=True) * scale


def test_what_fits_passes() -> None:
    for t in (R, I, V, S(0), S(0, Padded(21))):
        weigh(of(t, 6, 8), of(t, 6, 2), 2.0, name="x")


# arguments, and for each failing one: name and part of the text
REJECTED: list[tuple[Any, dict[str, str]]] = [
    (lambda: weigh(of(S(0), 6, 8), of(R, 6, 2)), {"gates_TK": "is R on axis 'tp', expected S(0)"}),
    (lambda: weigh(of(S(0), 6, 8), of(S(0), 5, 2)), {"gates_TK": "size of dimension T"}),
    (lambda: weigh(of(S(0), 6, 8), of(S(0), 6)), {"gates_TK": "does not fit its shape"}),
    (
        lambda: weigh(of(S(0), 6, 8), of(S(0), 6, 2, dtype=torch.int64)),
        {"gates_TK": "int64"},
    ),
    (lambda: weigh(of(R, 6, 8), of(R, 6, 2), "two"), {"scale": "is 'two', expected float"}),
    (lambda: weigh(of(R, 6, 8), 3), {"gates_TK": "is int, expected a tensor"}),
    (lambda: weigh(of(R, 6, 8), torch.from_numpy(numpy.ones((6, 2)))), {"gates_TK": "has no placement"}),
    (
        lambda: weigh(of(S(0), 6, 8), of(R, 5, 2), "two", name=3),
        {"gates_TK": "is R on axis", "scale": "is 'two'", "name": "is 3"},
    ),
    (lambda: weigh(of(S(0, Padded(21)), 6, 8), of(S(0), 6, 2)), {"gates_TK": "Padded(21)"}),
]  # fmt: skip


@pytest.mark.parametrize(("call", "failures"), REJECTED)
def test_all_failing_arguments_are_reported_at_once(
    call: Any, failures: dict[str, str]
) -> None:
    with pytest.raises(PlacementError) as caught:
        call()
    text = str(caught.value)
    assert caught.value.name == next(iter(failures))
    assert caught.value.where.endswith(".weigh")
    for name, part in failures.items():
        assert f"weigh: {name} " in text and part in text


def test_a_mismatch_of_placements_has_fields_and_a_fix() -> None:
    with pytest.raises(PlacementError) as caught:
        weigh(of(S(0), 6, 8), of(I, 6, 2))
    error = caught.value
    assert (error.name, error.axis, error.expected, error.actual) == (
        "gates_TK",
        "tp",
        "S(0)",
        "I",
    )
    assert [str(fix) for fix in error.fixes] == ["convert(gates_TK, 'tp', src=I, dst=S(0))"]
    assert error.fixes[0].backward == "all-gather over tp"
    assert error.operands == (
        "x_TD f32[T=6, D=8]{dp:R, tp:S(0)}",
        "gates_TK f32[T=6, K=2]{dp:R, tp:I}",
    )


def test_a_failed_check_binds_nothing() -> None:
    for _ in range(2):
        with pytest.raises(PlacementError, match="gates_TK"):
            weigh(of(S(0), 6, 8), of(R, 6, 2))
        weigh(of(V, 3, 8), of(V, 3, 2))


def test_the_result_is_checked_too() -> None:
    @typed
    def forget(x: Tokens) -> tuple[int, Annotated[Float[Tensor, " T"], On(tp=P)]]:
        return 1, x.sum(-1)

    with pytest.raises(PlacementError) as caught:
        forget(of(R, 6, 8))
    assert caught.value.name == "return[1]"


def test_containers_are_checked_entry_by_entry() -> None:
    @typed
    def all_partial(
        xs: list[Annotated[Float[Tensor, "..."], On(tp=P)]], *more: Tokens
    ) -> None:
        return None

    all_partial([of(P, 2)] * 4, of(R, 2, 3))
    for bad in range(4):
        xs = [of(P, 2) for _ in range(4)]
        xs[bad] = of(V, 2)
        with pytest.raises(PlacementError) as caught:
            all_partial(xs)
        assert caught.value.name == f"xs[{bad}]"
    with pytest.raises(PlacementError, match=r"more\[1\]"):
        all_partial([], of(R, 2, 3), of(S(0), 2, 3))


def test_optional_tensors_may_be_left_out() -> None:
    @typed
    def biased(
        x: Tokens, bias: Annotated[Float[Tensor, " D"], On(tp=R)] | None = None
    ) -> Tokens:
        return x if bias is None else x + bias

    biased(of(S(0), 2, 3))
    biased(of(S(0), 2, 3), of(R, 3))
    with pytest.raises(PlacementError, match="bias is V"):
        biased(of(S(0), 2, 3), of(V, 3))


@typed
@dataclasses.dataclass(frozen=True)
class Routing:
    gates_TK: Gates
    ids_TK: Annotated[Int[Tensor, "T K"], On(tp="t")]
    top_k: int


@typed
class Counts(NamedTuple):
    counts_E: Annotated[Int[Tensor, " E"], On(tp=P)]
    valid_T: Annotated[Bool[Tensor, " T"], On(tp=S(0))] | None = None


def test_fields_of_records_are_checked_when_they_are_made() -> None:
    Routing(of(S(0), 6, 2), of(S(0), 6, 2, dtype=torch.int64), 2)
    with pytest.raises(PlacementError, match="Routing: ids_TK is R"):
        Routing(of(S(0), 6, 2), of(R, 6, 2, dtype=torch.int64), 2)
    with pytest.raises(PlacementError, match="Routing: top_k is '2'"):
        Routing(of(R, 6, 2), of(R, 6, 2, dtype=torch.int64), "2")  # type: ignore[arg-type]
    Counts(of(P, 4, dtype=torch.int64))
    with pytest.raises(PlacementError, match="Counts: counts_E is R"):
        Counts(of(R, 4, dtype=torch.int64))


class Layout:
    tokens = S(0)
    everything: ClassVar = {"dp": R, "tp": S(0)}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layout = Layout()

    @typed
    def forward(
        self, x_TD: Annotated[Float[Tensor, "T D"], On(tp="{self.layout.tokens}")]
    ) -> Annotated[Float[Tensor, "T D"], On("{self.layout.everything}")]:
        return x_TD


def test_annotations_may_refer_to_attributes() -> None:
    layer = Layer()
    layer(of(S(0), 2, 3))
    with pytest.raises(PlacementError, match=r"Layer\.forward: x_TD is R on axis 'tp'"):
        layer(of(R, 2, 3))
    layer.layout.tokens = R
    with pytest.raises(PlacementError, match=r"return is R on axis 'tp', expected S\(0\)"):
        layer(of(R, 2, 3))


def test_axes_that_a_mesh_may_leave_out_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @typed
    def f(x: Annotated[Float[Tensor, "..."], On(cp=P, tp=R)]) -> None:
        return None

    monkeypatch.setattr("placements.types.mesh._families", {frozenset({"dp", "cp", "tp"})})
    f(of(R, 2))


def test_dims_may_be_counted_from_the_end() -> None:
    @typed
    def f(x: Annotated[Float[Tensor, "..."], On(tp=S(-1))]) -> None:
        return None

    f(of(S(1), 2, 3))
    with pytest.raises(PlacementError, match="expected S\\(1\\)"):
        f(of(S(0), 2, 3))


def test_on_is_a_value() -> None:
    assert On(tp=S(0), dp="t") == On(tp="S(0)", dp="t")
    assert hash(On(tp=R)) == hash(On({"tp": R}))
    assert repr(On("{self.x}", tp=S(0), dp="t")) == "On('{self.x}', tp=S(0), dp='t')"
    with pytest.raises(ValueError, match="must be a reference"):
        On("tokens")
    with pytest.raises(ValueError, match="is not a placement"):
        On(tp="S(zero)")


def test_a_reference_to_nothing_says_what_there_is() -> None:
    @typed
    def f(x: Annotated[Float[Tensor, "..."], On(tp="{layout.x}")]) -> None:
        return None

    with pytest.raises(
        ValueError, match="no argument of the function; its arguments are x"
    ):
        f(of(R, 2))


def test_with_checking_off_nothing_is_checked() -> None:
    from placements.runtime.state import suspended

    with suspended():
        weigh(torch.ones(2, 3), torch.ones(2, 2), 1, name=3)  # type: ignore[arg-type]


def test_annotations_that_say_different_things_are_not_taken_for_each_other() -> None:
    """`typing` hands out the first `Annotated` again for one that is equal."""
    said = [  # on axes that no other test names, whose annotations are kept too
        On(said=S(1)), On(said=S(1, Padded(5))), On(said=S(1, Padded(6))), On(said=S(1, Even(4))),
        On(other=S(0), said=S(0)), On(said=S(0), other=S(0)), On(said="only_here"), On("{self.only_here}"),
    ]  # fmt: skip
    made = [Annotated[Tensor, on].__metadata__[0] for on in said]
    assert all(one is on for one, on in zip(made, said, strict=True))
    assert On(tp=S(1, Padded(5))) == On(tp=S(1, Padded(5)))
    assert hash(On(tp=S(1, Padded(5)))) == hash(On(tp=S(1, Padded(5))))


@typed
class Base(nn.Module):
    w_D: Annotated[Float[Tensor, " D"], On(dp=R, tp=R)]

    def __init__(self) -> None:
        super().__init__()
        self.w_D = nn.Parameter(torch.ones(3))

    def forward(self, x_TD: Annotated[Float[Tensor, "T D"], On(dp=R, tp="t")]) -> Tensor:
        return x_TD * self.w_D


class Derived(Base):
    pass


def test_a_subclass_of_a_typed_module_keeps_its_types() -> None:
    assert type_of(Derived()(of(S(0), 2, 3))) == {"dp": R, "tp": S(0)}


def test_what_typed_cannot_check_it_says() -> None:
    with pytest.raises(TypeError, match="dataclasses, named tuples and"):
        typed(type("Plain", (), {}))

    def rows() -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match="generator"):
        typed(rows)


def test_a_number_binds_no_placement_variable() -> None:
    @typed
    def add(
        a_T: Annotated[Float[Tensor, " T"], On(dp=R, tp="t")],
        b_T: Annotated[Float[Tensor, " T"], On(dp=R, tp="t")],
    ) -> Tensor:
        return a_T + b_T

    x = of(S(0), 3)
    assert type_of(add(torch.zeros(x.shape[0]), x)) == {"dp": R, "tp": S(0)}
