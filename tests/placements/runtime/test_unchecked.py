"""A check that cannot be made is said: no mesh in the block, an axis that no mesh has."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn

from placements import (
    I,
    Mesh,
    On,
    P,
    PlacementError,
    R,
    S,
    UncheckedWarning,
    all_reduce,
    assert_type,
    axis_rank,
    declare,
    global_mean,
    gradient_axes,
    join,
    optional_axes,
    own_generator,
    reduce_gradients,
    region,
    set_current_mesh,
    shared_generator,
    split,
    type_of,
    typecheck,
    typed,
    verify,
)

MESH = {"dp": 2, "tp": 2}


@pytest.mark.parametrize("block", [typecheck, verify])
def test_a_block_without_a_mesh_warns_at_the_users_line(block: Any) -> None:
    with pytest.warns(UncheckedWarning, match="no mesh was current") as caught:
        with block():
            torch.ones(3) + 1
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("block", [typecheck, verify])
def test_a_mesh_that_is_current_at_any_time_is_enough(block: Any) -> None:
    with set_current_mesh(MESH), block():
        torch.ones(3) + 1
    with block():
        torch.ones(3) + 1
        with set_current_mesh(MESH):
            assert_type(torch.ones(2), {"dp": R, "tp": R})
    with set_current_mesh({}), block():  # one device, said
        torch.ones(3) + 1
    with set_current_mesh({"dp": 1}), block():
        torch.ones(3) + 1


def test_a_block_inside_another_does_not_warn() -> None:
    with set_current_mesh(MESH), typecheck():
        with set_current_mesh(None), typecheck():
            torch.ones(3) + 1


def test_as_an_error_it_comes_after_the_block_was_left() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncheckedWarning)
        with pytest.raises(UncheckedWarning):
            with typecheck():
                torch.ones(3)
    with set_current_mesh(MESH), typecheck():
        assert type_of(assert_type(torch.ones(2), {"dp": R, "tp": R}))
    assert type_of(torch.ones(2)) is None


def test_an_error_in_the_block_is_not_covered_by_the_warning() -> None:
    with pytest.raises(KeyError):
        with typecheck():
            raise KeyError


@typed
def mistyped(x: Annotated[Float[Tensor, " T"], On(dp=R, tpp=S(0))]) -> Tensor:
    return x


@typed
def mistyped_variable(x: Annotated[Tensor, On(dp=R, tpp="t")]) -> Tensor:
    return x


@typed
def mistyped_result(x: Tensor) -> Annotated[Tensor, On(tpp=S(0))]:
    return x


@typed
@dataclass
class Mistyped:
    x: Annotated[Tensor, On(tpp=S(0))]


@typed
class MistypedModule(nn.Module):
    weight: Annotated[Tensor, On(dp=R, tp=R, tpp=R)]

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def declared_module(**types: Any) -> nn.Module:
    linear = nn.Linear(2, 2, bias=False)
    declare(linear, {"weight": types})
    return linear


def value() -> Tensor:
    return assert_type(torch.ones(2), {"dp": R, "tp": R})


BOTH, EXTRA = {"dp": R, "tp": R}, {"dp": R, "tp": R, "tpp": R}

DOORS: dict[str, Callable[[], Any]] = {
    "an argument": lambda: mistyped(value()),
    "a variable": lambda: mistyped_variable(value()),
    "a result": lambda: mistyped_result(value()),
    "a field": lambda: Mistyped(value()),
    "a module": lambda: MistypedModule()(value()),
    "assert_type": lambda: assert_type(torch.ones(2), EXTRA),
    "assert_type again": lambda: assert_type(value(), EXTRA),
    "declare": lambda: declared_module(**EXTRA)(value()),
    "declare, by mistake for tp": lambda: declared_module(dp=R, tpp=R)(value()),
    "gradients": lambda: reduce_gradients(declared_module(**EXTRA)),
    "gradients, by mistake for tp": lambda: gradient_axes(declared_module(dp=R, tpp=R)),
    "region, ins": lambda: region(torch.exp, ins=[EXTRA], outs=BOTH, grads=[{"dp": P, "tp": P}])(value()),
    "region, outs": lambda: region(torch.exp, ins=[BOTH], outs=EXTRA, grads=[{"dp": P, "tp": P}])(value()),
    "region, grads": lambda: region(torch.exp, ins=[BOTH], outs=BOTH, grads=[{"dp": P, "tp": P, "tpp": P}])(value()),
    "split": lambda: split(torch.ones(2), EXTRA, MESH),
    "join": lambda: join([torch.ones(2)] * 4, EXTRA, MESH),
    "global_mean": lambda: global_mean(torch.ones(()), 1.0, ("tpp",)),
    "all_reduce": lambda: all_reduce(torch.ones(2), "tpp", src=P, dst=R),
    "axis_rank": lambda: axis_rank("tpp"),
    "shared_generator": lambda: shared_generator("tpp").__enter__(),
    "own_generator": lambda: own_generator("dp", "tpp").__enter__(),
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_an_axis_that_no_mesh_has_is_said(door: str) -> None:
    with set_current_mesh(MESH), typecheck():
        with pytest.raises(ValueError, match=r"'tpp'.*Did you mean 'tp'"):
            DOORS[door]()


def test_a_type_that_names_another_axis_is_another_type() -> None:
    with set_current_mesh(MESH), typecheck():
        assert type_of(value()) == {"dp": R, "tp": R}
        assert type_of(value()) != EXTRA


def test_the_axis_is_said_on_ranks_of_one_too() -> None:
    """All types coincide there, but the name is wrong all the same."""
    with set_current_mesh({"dp": 1, "tp": 1}), typecheck():
        with pytest.raises(PlacementError, match="Did you mean 'tp'"):
            mistyped(torch.ones(2))
    for nothing in (None, {}):
        with set_current_mesh(nothing), warnings.catch_warnings():
            warnings.simplefilter("ignore", UncheckedWarning)
            with typecheck():
                mistyped(torch.ones(2))  # one device, of which no axis is known


@typed
def on_an_optional_axis(
    x: Annotated[Tensor, On(dp=S(0), ring=S(1), tp=R)],
) -> Annotated[Tensor, On(dp=S(0), ring=S(1), tp=R)]:
    return x * 2


def test_an_axis_may_be_left_out_if_it_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placements.types.mesh._families", set[frozenset[str]]())
    with set_current_mesh(MESH), typecheck():
        x = assert_type(torch.ones(2, 2), {"dp": S(0), "tp": R})
        with pytest.raises(PlacementError, match=r"call optional_axes\('ring', \.\.\.\)"):
            on_an_optional_axis(x)
        optional_axes("dp", "ring", "tp")
        assert type_of(on_an_optional_axis(x)) == {"dp": S(0), "tp": R}
        assert_type(x, {"dp": S(0), "ring": S(1), "tp": R})
    with set_current_mesh({"dp": 2, "ring": 2, "tp": 2}), typecheck():
        y = assert_type(torch.ones(2, 2), {"dp": S(0), "ring": R, "tp": R})
        with pytest.raises(PlacementError, match="x is R on axis 'ring'"):
            on_an_optional_axis(y)
    with set_current_mesh({"data": 4}), typecheck():  # a mesh with none of these axes
        z = assert_type(torch.ones(2, 2), {"data": R})
        with pytest.raises(PlacementError, match="names axis 'dp'"):
            on_an_optional_axis(z)
    with pytest.raises(ValueError, match="must be a name"):
        optional_axes("not a name")
    with pytest.raises(ValueError, match="together with those"):
        optional_axes("cp")


@typed
def on_either_mesh(x: Annotated[Tensor, On(blue=I, green=I)]) -> Tensor:
    return x


def test_an_axis_of_another_presentation_is_known() -> None:
    with set_current_mesh(Mesh({"blue": 2, "red": 3})), typecheck():
        x = assert_type(torch.ones(2), {"blue": I, "red": I})
        with pytest.raises(PlacementError, match="'green'"):
            on_either_mesh(x)
        with set_current_mesh(Mesh({"green": 6})):
            y = assert_type(torch.ones(2), {"green": I})
            on_either_mesh(y)  # blue is an axis of the mesh around this one
        with pytest.raises(PlacementError, match="'green'"):
            on_either_mesh(x)  # what was current before does not matter


def test_the_layer_runs_on_meshes_that_leave_its_axes_out() -> None:
    from spmd_moe import MoE, MoEConfig, Parallel

    config = MoEConfig(dim=8, hidden_dim=8, num_experts=4, top_k=2)
    with set_current_mesh({"dp": 2, "tp": 1}), typecheck():
        moe = MoE(config, Parallel(dp=2))
        x = assert_type(torch.randn(2, 3, 8), moe.input_types(3))
        assert type_of(moe(x, seq_len=3)) == {"dp": S(0)}
