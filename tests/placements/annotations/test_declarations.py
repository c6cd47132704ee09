"""Parameters, copies, loading, checkpointing, custom Functions, regions, compile."""

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
    region,
    reinterpret,
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


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


class DeclaredTwice(Twice):
    @staticmethod
    def placement_rule(x: Any) -> Any:
        return x


def test_a_custom_function_must_say_what_it_does() -> None:
    with typecheck():
        x = assert_type(torch.randn(3, requires_grad=True), {"tp": S(0)})
        with pytest.raises(PlacementError, match=r"Twice\.apply") as caught:
            Twice.apply(x)
        assert "placement_rule" in str(caught.value)
        assert type_of(DeclaredTwice.apply(x)) == {"tp": S(0)}
    assert type_of(Twice.apply(torch.ones(2))) is None


def experts(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, w)


def test_a_region_checks_what_it_can_and_stamps_the_rest() -> None:
    opaque = region(
        lambda x: torch.special.i0(x),
        ins=[{"tp": S(0)}], grads=[{"tp": S(0)}], outs={"tp": S(0)},
    )  # fmt: skip
    known = region(
        experts,
        ins=[{"tp": R}, {"tp": S(0)}],
        grads=[{"tp": P}, {"tp": S(0)}],
        outs={"tp": S(1)},
    )
    lie = region(
        experts,
        ins=[{"tp": R}, {"tp": S(0)}],
        grads=[{"tp": P}, {"tp": S(0)}],
        outs={"tp": R},
    )
    with typecheck():
        x = assert_type(torch.randn(3, 8), {"tp": R})
        w = assert_type(torch.randn(4, 8), {"tp": S(0)})
        assert type_of(known(x, w)) == {"tp": S(1)}
        assert type_of(opaque(w)) == {"tp": S(0)}
        with pytest.raises(PlacementError, match="is S\\(1\\) on axis 'tp', expected R"):
            lie(x, w)


def test_the_gradient_type_of_a_region_has_no_default_and_must_be_the_dual() -> None:
    with pytest.raises(TypeError, match="grads"):
        region(experts, ins=[{"tp": R}, {"tp": S(0)}], outs={"tp": S(1)})  # type: ignore[call-arg]
    wrong = region(
        experts,
        ins=[{"tp": R}, {"tp": S(0)}],
        grads=[{"tp": R}, {"tp": S(0)}],
        outs={"tp": S(1)},
    )
    with typecheck():
        x = assert_type(torch.randn(3, 8), {"tp": R})
        w = assert_type(torch.randn(4, 8), {"tp": S(0)})
        with pytest.raises(
            PlacementError, match="already complete belongs to an Invariant"
        ):
            wrong(x, w)


def test_an_invariant_input_of_a_region_is_refused_inside() -> None:
    body = region(
        experts,
        ins=[{"tp": I}, {"tp": S(0)}],
        grads=[{"tp": I}, {"tp": S(0)}],
        outs={"tp": S(1)},
    )
    with typecheck():
        x = assert_type(torch.randn(3, 8), {"tp": I})
        w = assert_type(torch.randn(4, 8), {"tp": S(0)})
        with pytest.raises(PlacementError, match="Invariant mixes with nothing"):
            body(x, w)


@pytest.mark.parametrize("t", ["R", "V"])
def test_backward_from_a_loss_that_is_not_one_number_is_refused(t: str) -> None:
    with typecheck():
        loss = assert_type(torch.ones((), requires_grad=True), {"tp": t})
        with pytest.raises(PlacementError) as caught:
            loss.backward()
        assert caught.value.axis == "tp" and caught.value.fixes


def test_backward_checks_the_gradient_that_is_handed_in() -> None:
    with typecheck():
        y = assert_type(torch.ones(3, requires_grad=True), {"tp": R}) * 2
        wrong = assert_type(torch.randn(3), {"tp": R})
        with pytest.raises(PlacementError, match="dual of its type"):
            y.backward(wrong)
        y.backward(assert_type(torch.randn(3), {"tp": P}))


def test_compiled_code_runs_annotated_functions_erased() -> None:
    @typed
    def scaled(x_T: Annotated[Float[Tensor, " T"], On(tp="t")]) -> Tensor:
        return x_T * 2

    compiled = torch.compile(scaled, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))


def test_reinterpreted_losses_reach_backward() -> None:
    with typecheck():
        loss = assert_type(torch.ones((), requires_grad=True), {"tp": V})
        reinterpret(loss, "tp", src=V, dst=P).backward()
