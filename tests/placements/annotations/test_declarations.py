"""Declared parameters keep their types: through copies, loading and checkpointing."""

import copy
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint

from placements import (
    I,
    On,
    P,
    PlacementError,
    R,
    S,
    V,
    all_reduce,
    assert_type,
    convert,
    declare,
    set_current_mesh,
    type_of,
    typecheck,
    typed,
)


@pytest.fixture(autouse=True)
def mesh() -> Iterator[None]:
    with set_current_mesh({"tp": 4}):
        yield


@typed
class Mlp(nn.Module):
    """A tensor-parallel MLP whose weights say how they are cut."""

    w_in_HD: Annotated[Float[Tensor, "H D"], On(tp=S(0))]
    w_out_DH: Annotated[Float[Tensor, "D H"], On(tp=S(1))]

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w_in_HD = nn.Parameter(torch.randn(hidden, dim))
        self.w_out_DH = nn.Parameter(torch.randn(dim, hidden))

    def forward(
        self, x_TD: Annotated[Float[Tensor, "T D"], On(tp=I)]
    ) -> Annotated[Float[Tensor, "T D"], On(tp=I)]:
        x_TD = convert(x_TD, "tp", src=I, dst=R)
        y_TD = linear(silu(linear(x_TD, self.w_in_HD)), self.w_out_DH)
        return all_reduce(y_TD, "tp", src=P, dst=I)


def run(model: nn.Module) -> Tensor:
    with typecheck():
        x = assert_type(torch.randn(3, 8), {"tp": I})
        return model(x)


def same(model: nn.Module) -> nn.Module:
    return model


def loaded(model: nn.Module) -> nn.Module:
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    return model


def assigned(model: nn.Module) -> nn.Module:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return model


def emptied(model: nn.Module) -> nn.Module:
    return model.to("meta").to_empty(device="cpu")


def cast(model: nn.Module) -> nn.Module:
    return model.double().float()


@pytest.mark.parametrize("change", [same, copy.deepcopy, loaded, assigned, emptied, cast])
@pytest.mark.parametrize("kind", ["typed", "declared"])
def test_declared_parameters_survive(change: Any, kind: str) -> None:
    model: nn.Module = Mlp(8, 4)
    if kind == "declared":
        model = nn.Sequential(nn.Linear(8, 4, bias=False))
        declare(model, {"0.weight": {"tp": S(0)}})
    changed = change(model)
    with typecheck():
        x = assert_type(torch.randn(3, 8), {"tp": I if kind == "typed" else R})
        y = changed(x)
    assert type_of(y) == {"tp": I if kind == "typed" else S(1)}


def test_a_parameter_without_a_declaration_is_refused_by_name() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            return linear(x, self.weight)

    with pytest.raises(PlacementError, match=r"self\.weight has no placement"):
        run(Bare())


def test_a_declaration_of_a_parameter_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter or buffer 'bias'"):
        declare(nn.Linear(2, 2, bias=False), {"bias": {"tp": R}})


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_types_and_gradients(
    use_reentrant: bool,
) -> None:
    model = Mlp(8, 4)
    grads: list[list[Tensor]] = []
    for recompute in (False, True):
        model.zero_grad()
        with typecheck():
            torch.manual_seed(0)
            x = assert_type(torch.randn(3, 8, requires_grad=True), {"tp": I})
            y = checkpoint(model, x, use_reentrant=use_reentrant) if recompute else model(x)
            assert type_of(y) == {"tp": I}
            y.sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for plain, recomputed in zip(*grads, strict=True):
        assert torch.equal(plain, recomputed)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(2)])
        declare(self, {"weights.0": {"tp": V}, "weights.1": {"tp": V}})

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights[0] + x * self.weights[1]


def test_parameters_in_a_list_have_the_types_declared_for_them() -> None:
    with typecheck():
        x = assert_type(torch.ones(4), {"tp": V})
        assert type_of(Experts()(x)) == {"tp": V}
