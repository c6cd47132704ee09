"""Declared parameters keep their types: through copies, loading and checkpointing."""

import copy
from collections.abc import Callable
from typing import Annotated, Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint

from placements import (
    AxisType,
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
from tests.support.checked import mesh_of

mesh = mesh_of(tp=4)


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


class Tied(nn.Module):
    """Uses the weight of a layer that it never calls, as models with tied weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, ids: Tensor) -> Tensor:
        return linear(self.embedding(ids) * self.scale, self.head.weight)


def test_one_line_declares_a_whole_tree() -> None:
    model = Tied()
    declare(model, {"*": {"tp": R}})
    with typecheck():
        ids = assert_type(torch.zeros(2, 3, dtype=torch.long), {"tp": S(0)})
        assert type_of(model(ids)) == {"tp": S(0)}


def test_of_several_names_that_fit_the_first_one_holds() -> None:
    model = Tied()
    declare(model, {"head.*": {"tp": S(0)}, "*": {"tp": R}})
    with typecheck():
        ids = assert_type(torch.zeros(2, 3, dtype=torch.long), {"tp": R})
        assert type_of(model(ids)) == {"tp": S(2)}
        assert type_of(model.head.weight) == {"tp": S(0)}


def test_a_declared_tree_is_typed_again_after_it_is_copied() -> None:
    model = Tied()
    declare(model, {"*": {"tp": R}})
    copied = copy.deepcopy(model)
    copied.head.weight = nn.Parameter(torch.randn(8, 4))
    with typecheck():
        ids = assert_type(torch.zeros(2, 3, dtype=torch.long), {"tp": R})
        assert type_of(copied(ids)) == {"tp": R}


def test_a_name_that_fits_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no parameter or buffer 'tail\.\*'"):
        declare(Tied(), {"tail.*": {"tp": R}})


@pytest.mark.parametrize(
    ("make", "known"),
    [
        (lambda x: torch.ones(x.shape[0]).sum(), P),
        (lambda x: torch.tensor(x.shape[0]), P),
        (lambda x: torch.ones_like(x), S(0)),
        (lambda x: torch.randn(x.shape[0], 2), S(0)),
    ],
)
def test_a_constant_of_a_pieces_sizes_cannot_be_declared_otherwise(
    make: Callable[[Tensor], Tensor], known: AxisType
) -> None:
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.randn(2, 4), {"a": S(0)})
        assert assert_type(make(x), {"a": known}) is not None
        with pytest.raises(PlacementError, match="on axis 'a', expected R"):
            assert_type(make(x), {"a": R})


def test_a_tied_parameter_has_one_declaration() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        embedding, head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        head.weight = embedding.weight
        declare(embedding, {"weight": {"a": R}})
        declare(head, {"weight": {"a": S(0)}})
        y = embedding(assert_type(torch.tensor([0, 1]), {"a": R}))
        with pytest.raises(
            PlacementError, match=r"weight is R on axis 'a', expected S\(0\)"
        ):
            head(y)


@pytest.mark.parametrize("change", ["functional_call", "data"])
def test_a_tensor_in_the_place_of_a_parameter_has_the_declared_type(change: str) -> None:
    with set_current_mesh({"a": 2}), typecheck():
        linear_module = nn.Linear(3, 2, bias=False)
        declare(linear_module, {"weight": {"a": R}})
        own = assert_type(torch.randn(2, 3), {"a": V})
        x = assert_type(torch.randn(2, 3), {"a": S(0)})
        with pytest.raises(PlacementError, match=r"weight is V\w* on axis 'a', expected R"):
            if change == "functional_call":
                torch.func.functional_call(linear_module, {"weight": own}, (x,))
            else:
                linear_module.weight.data = own.clone()
                linear_module(x)


@pytest.mark.parametrize("name", ["weight.x", "wieght", "other.weight", "*.bias"])
def test_a_name_that_fits_nothing_is_a_value_error(name: str) -> None:
    with pytest.raises(ValueError, match="no parameter or buffer"):
        declare(nn.Linear(2, 2), {name: {"tp": R}})


def test_a_declaration_on_the_axes_of_the_mesh_around_says_which_mesh_is_current() -> None:
    with set_current_mesh({"dp": 2, "tp": 2}), typecheck(), set_current_mesh({"ep": 4}):
        with pytest.raises(ValueError, match="make the mesh of the declaration current"):
            assert_type(torch.ones(2), {"dp": R, "tp": R})
