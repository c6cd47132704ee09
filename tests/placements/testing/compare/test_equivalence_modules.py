"""Modules in the kit: the mesh in backward, sizes of parameters, and short reports."""

from typing import Annotated, Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn

from placements import I, On, P, Padded, R, S, all_reduce, convert, declare, typed
from placements.runtime.mesh import current_mesh
from placements.testing import assert_spmd_equivalent, check_spmd_case

TD = Float[Tensor, "T D"]


class _Summed(torch.autograd.Function):
    """Its backward asks for the current mesh, as a typed collective does."""

    @staticmethod
    def placement_rule(x: Any) -> Any:
        return {"tp": R}

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        mesh = current_mesh()
        assert mesh is not None, "backward ran outside the mesh"
        return all_reduce(grads[0], "tp", src=P, dst=I)


@typed
def entered(
    x_TD: Annotated[TD, On(tp=I)], w_DF: Annotated[Float[Tensor, "D F"], On(tp=S(1))]
) -> Annotated[Float[Tensor, "T F"], On(tp=S(1))]:
    made: Any = _Summed.apply(x_TD)
    return made @ w_DF


def product(x_TD: Tensor, w_DF: Tensor) -> Tensor:
    return x_TD @ w_DF


def test_backward_runs_under_the_mesh() -> None:
    inputs: Any = {
        "x_TD": (torch.ones(3, 2).double(), {"tp": I}),
        "w_DF": (torch.arange(8).double().reshape(2, 4), {"tp": S(1)}),
    }
    assert check_spmd_case(entered, product, inputs, mesh={"tp": 2})
    assert_spmd_equivalent(entered, product, examples=20)


def weight(*shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(sum(shape))
    return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))


@typed
class Column(nn.Module):
    """No size of `D` but that of the weight goes with `x_TD`."""

    w_DF: Annotated[Float[Tensor, "D F"], On(tp=S(1))]

    def __init__(self, d: int = 8, f: int = 12) -> None:
        super().__init__()
        self.w_DF = weight(d, f)

    def forward(
        self, x_TD: Annotated[TD, On(tp=I)]
    ) -> Annotated[Float[Tensor, "T F"], On(tp=S(1))]:
        return convert(x_TD, "tp", src=I, dst=R) @ self.w_DF


class Plain(nn.Module):
    def __init__(self, d: int = 8, f: int = 12, scale: float = 1.0) -> None:
        super().__init__()
        self.w_DF, self.scale = weight(d, f), scale

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD @ self.w_DF * self.scale


def test_a_parameter_gives_its_letters_their_sizes() -> None:
    assert_spmd_equivalent(Column(), Plain(), examples=20)
    assert_spmd_equivalent(Column(), Plain(), sizes={"D": 8}, examples=20)
    with pytest.raises(ValueError, match="sizes: a parameter says that 'D' is 8"):
        assert_spmd_equivalent(Column(), Plain(), sizes={"D": [4, 8]})


@typed
class Rows(Column):
    """The dim that it shares with the weight is cut, as the weight is: evenly."""

    w_DF: Annotated[Float[Tensor, "D F"], On(tp=S(0))]

    def forward(self, x_TD: Annotated[TD, On(tp=S(1))]) -> Annotated[Tensor, On(tp=R)]:
        return all_reduce(x_TD @ self.w_DF, "tp", src=P, dst=R)


def test_a_dim_is_cut_as_the_parameter_is() -> None:
    assert_spmd_equivalent(Rows(), Plain(), examples=20)


class Holder(nn.Module):
    """The annotated parameter is inside; a letter means there what it means here."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @typed
    def forward(self, x_TD: Annotated[TD, On(tp=I)]) -> Tensor:
        return self.inner(x_TD)


def test_letters_of_modules_inside_count() -> None:
    assert_spmd_equivalent(Holder(Column()), Holder(Plain()), examples=10)


@typed
class Contradicted(nn.Module):
    w_D: Annotated[Float[Tensor, " D"], On(tp=R)]
    b_D: Annotated[Float[Tensor, " D"], On(tp=R)]

    def __init__(self) -> None:
        super().__init__()
        self.w_D, self.b_D = weight(3), weight(4)

    def forward(self, x_TD: Annotated[TD, On(tp=S(0))]) -> Tensor:
        return x_TD * self.w_D


@typed
class Stated(Column):
    def forward(
        self, x_DT: Annotated[Float[Tensor, "D T"], On(tp=S(0, Padded(5)))]
    ) -> Tensor:
        return x_DT


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Contradicted(), "dim 'D' is 3 in parameter 'w_D' but 4 in 'b_D'"),
        (Stated(), "an extent says that 'D' is 5, and a parameter that it is 8"),
    ],
)
def test_sizes_that_contradict_each_other_are_one_error(
    module: nn.Module, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        assert_spmd_equivalent(module, module)


@typed
class ColumnOfMany(Column):
    def __init__(self) -> None:
        super().__init__(64, 64)


def test_a_failing_module_is_printed_without_its_weights() -> None:
    module, wrong = ColumnOfMany(), Plain(64, 64, scale=2.0)
    with pytest.raises(AssertionError) as failure:
        assert_spmd_equivalent(module, wrong, examples=20, max_ranks=2)
    text = str(failure.value)
    assert len(text) < 2000, f"{len(text)} characters are printed"
    assert "'w_DF': (held['w_DF'].detach()" in text and ".reshape((64, 64))" in text
    assert "'x_TD': (" in text and "mesh={'tp': 1}" in text
    code = text[text.index("# the smallest case found") :]
    with pytest.raises(AssertionError) as again:
        exec(code, {"fn": module, "reference": wrong})
    assert str(again.value) == text[: text.index("\n\n# the smallest case")]


class Wide(nn.Module):
    @typed
    def forward(
        self, x_TD: Annotated[Float[Tensor, "T 500"], On(tp=S(0))]
    ) -> Annotated[Float[Tensor, "T 500"], On(tp=S(0))]:
        return x_TD * 2


def test_a_large_argument_is_printed_as_the_call_that_draws_it() -> None:
    class Same(nn.Module):
        def forward(self, x_TD: Tensor) -> Tensor:
            return x_TD

    module = Wide()
    with pytest.raises(AssertionError) as failure:
        assert_spmd_equivalent(module, Same(), examples=20)
    text = str(failure.value)
    assert "drawn_value('x_TD', (1, 500), torch.float64, seed=" in text
    assert len(text) < 2000
    with pytest.raises(AssertionError) as again:
        exec(text[text.index("# the smallest") :], {"fn": module, "reference": Same()})
    assert str(again.value) == text[: text.index("\n\n# the smallest case")]


def test_a_declared_module_without_annotations_still_takes_given_sizes() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = weight(4)

        @typed
        def forward(self, x_TD: Annotated[TD, On(tp=S(0))]) -> Tensor:
            return x_TD * self.w

    class BarePlain(Bare):
        def forward(self, x_TD: Tensor) -> Tensor:
            return x_TD * self.w

    module = Bare()
    declare(module, {"w": {"tp": R}})
    assert_spmd_equivalent(module, BarePlain(), sizes={"D": 4}, examples=10)
