"""Saved on one mesh, loaded on any other: a name stands for one global value."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from placements import (
    I,
    P,
    PlacementError,
    R,
    S,
    V,
    declare,
    global_state_dict,
    load_global_state_dict,
    set_current_mesh,
    split,
    typecheck,
)
from placements.testing import RankFailure, device_mesh, run_ranks
from placements.types.extents import Folded, Padded, Ragged

VALUES: dict[str, Tensor] = {
    "gate.weight": torch.arange(36.0).view(12, 3),
    "experts.w_EDF": torch.arange(12 * 2 * 5.0).view(12, 2, 5).double(),
    "experts.bias_E": torch.arange(12),
    "embedding.weight": torch.arange(14.0).view(7, 2),
    "folded.weight": torch.arange(10.0).to(torch.bfloat16),
}


def types_on(mesh: dict[str, int]) -> dict[str, Any]:
    """Uneven where it can be: 7 rows over tp; 5 columns over tp; 2 blocks of 5 rows."""
    ragged = Ragged(7, *[0] * (mesh["tp"] - 1))
    return {
        "gate.weight": {"ep": R, "tp": I},
        "experts.w_EDF": {"ep": S(0), "tp": S(2, Padded(5))},
        "experts.bias_E": {"ep": S(0), "tp": I},
        "embedding.weight": {"ep": R, "tp": S(0, ragged)},
        "folded.weight": {"ep": R, "tp": S(0, Folded(2, Padded(5)))},
    }


class Layer(nn.Module):
    """A module with this rank's pieces of zeros, a buffer among them."""

    def __init__(self, mesh: dict[str, int], rank: int) -> None:
        super().__init__()
        for name, types in types_on(mesh).items():
            owner, leaf = name.split(".")
            if not hasattr(self, owner):
                self.add_module(owner, nn.Module())
            piece = split(torch.zeros_like(VALUES[name]), types, mesh)[rank]
            if leaf == "bias_E":
                self.get_submodule(owner).register_buffer(leaf, piece)
            else:
                self.get_submodule(owner).register_parameter(leaf, nn.Parameter(piece))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        declare(self, types_on(mesh))


def round_trip(
    mesh: dict[str, int], state: dict[str, Tensor], checked: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Load, and save again: this rank's pieces, and the global values."""
    device = device_mesh()
    layer = Layer(mesh, device.get_rank())
    before = {name: t.data_ptr() for name, t in layer.state_dict().items()}
    with set_current_mesh(device):
        if checked:
            with typecheck():
                load_global_state_dict(layer, state)
                saved = global_state_dict(layer)
        else:
            load_global_state_dict(layer, state)
            saved = global_state_dict(layer)
    pieces = layer.state_dict()
    # In place: an optimizer or a checkpointer that refers to the tensors still does.
    assert before == {name: t.data_ptr() for name, t in pieces.items()}
    assert all(saved[name].data_ptr() != at for name, at in before.items() if at)
    return {name: t.detach() for name, t in pieces.items()}, saved


def check(mesh: dict[str, int], ranks: list[Any]) -> None:
    for name, types in types_on(mesh).items():
        expected = split(VALUES[name], types, mesh)
        for rank, (pieces, saved) in enumerate(ranks):
            assert torch.equal(pieces[name], expected[rank]), name
            assert torch.equal(saved[name], VALUES[name]), name
            assert saved[name].dtype == VALUES[name].dtype
            assert not saved[name].requires_grad


@pytest.mark.parametrize("new", [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 3), (3, 1)])
@pytest.mark.parametrize("old", [(2, 1), (2, 2)])
def test_saved_on_one_mesh_loaded_on_another(
    old: tuple[int, int], new: tuple[int, int]
) -> None:
    saving, loading = ({"ep": ep, "tp": tp} for ep, tp in (old, new))
    first = run_ranks(saving, round_trip, saving, VALUES)
    check(saving, first)
    check(loading, run_ranks(loading, round_trip, loading, first[0][1]))


def test_round_trip_while_checking() -> None:
    mesh = {"ep": 2, "tp": 2}
    check(mesh, run_ranks(mesh, round_trip, mesh, VALUES, True))


def test_round_trip_on_gloo() -> None:
    mesh = {"ep": 2, "tp": 2}
    check(mesh, run_ranks(mesh, round_trip, mesh, VALUES, backend="gloo"))


def test_one_device_needs_no_declaration_and_no_mesh() -> None:
    layer = nn.Linear(2, 3)
    state = global_state_dict(layer)
    assert state.keys() == layer.state_dict().keys()
    other = nn.Linear(2, 3)
    load_global_state_dict(other, state)
    assert torch.equal(other.weight, layer.weight)


class One(nn.Module):
    def __init__(self, types: Any, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)
        if types is not None:
            declare(self, {"weight": types})


def saved(types: Any, same: bool = True) -> Tensor:
    mesh = device_mesh()
    value = torch.arange(3.0) + (0 if same else mesh.get_rank())
    with set_current_mesh(mesh):
        return global_state_dict(One(types, value))["weight"]


def test_varying_values_are_stacked_and_partial_ones_summed() -> None:
    mesh = {"dp": 2, "tp": 2}
    stacked = run_ranks(mesh, saved, {"dp": V, "tp": V}, False)[3]
    assert stacked[..., 0].tolist() == [[0, 1], [2, 3]]
    assert run_ranks(mesh, saved, {"dp": P, "tp": I})[3].tolist() == [0, 2, 4]


def loaded(types: Any, value: Tensor) -> list[float]:
    one = One(types, torch.zeros(3))
    with set_current_mesh(device_mesh()):
        load_global_state_dict(one, {"weight": value})
    return one.weight.tolist()


def test_varying_and_partial_values_come_back() -> None:
    mesh = {"dp": 2}
    rows = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert run_ranks(mesh, loaded, {"dp": V}, torch.tensor(rows)) == rows
    value = torch.tensor(rows[0])
    assert run_ranks(mesh, loaded, {"dp": P}, value) == [rows[0], [0.0, 0.0, 0.0]]


def failure(mesh: dict[str, int], fn: Any, *args: Any) -> Any:
    with pytest.raises(RankFailure) as caught:
        run_ranks(mesh, fn, *args)
    return caught.value.cause


def test_only_equal_values_share_a_name() -> None:
    # B74: each rank's own experts, saved under the same names.
    error = failure({"ep": 2}, saved, {"ep": R}, False)
    assert isinstance(error, PlacementError)
    assert error.name == "weight" and "Shard or Varying" in error.rule
    pieces = run_ranks({"ep": 2}, saved, {"ep": S(0)}, False)
    assert [piece.tolist() for piece in pieces] == [[0, 1, 2, 1, 2, 3]] * 2


def uneven_without_extent() -> None:
    mesh = device_mesh()
    rows = (3, 2)[mesh.get_rank()]
    with set_current_mesh(mesh):
        global_state_dict(One({"tp": S(0)}, torch.zeros(rows)))


def test_ranks_that_disagree_on_an_extent_are_told_before_anything_is_sent() -> None:
    error = failure({"tp": 2}, uneven_without_extent)
    assert isinstance(error, PlacementError) and error.name == "weight"
    assert "(6,)" in error.expected and "(4,)" in error.actual


def load_bad(types: Any, state: dict[str, Tensor]) -> list[float]:
    one = One(types, torch.zeros(2))
    with set_current_mesh(device_mesh()):
        try:
            load_global_state_dict(one, state)
        finally:
            assert one.weight.tolist() == [0, 0], "nothing is written"
    return one.weight.tolist()


@pytest.mark.parametrize(
    ("types", "state", "words"),
    [
        ({"tp": S(0)}, {"weight": torch.ones(3)}, r"'weight' is \[3\].*makes \[4\]"),
        ({"tp": V}, {"weight": torch.ones(4, 2)}, r"'weight' is \[4, 2\]"),
        ({"tp": I}, {"w": torch.ones(2)}, r"missing \['weight'\], left over \['w'\]"),
        ({"ep": I}, {"weight": torch.ones(2)}, "'weight' is declared on"),
        ({"tp": S(1)}, {"weight": torch.ones(2)}, "'weight'.*dim"),
        (None, {"weight": torch.ones(2)}, "'weight' has no declared type"),
    ],
)
def test_errors_name_the_parameter(types: Any, state: Any, words: str) -> None:
    error = failure({"tp": 2}, load_bad, types, state)
    assert isinstance(error, ValueError)
    with pytest.raises(ValueError, match=words):
        raise error


class WithExtra(nn.Module):
    def get_extra_state(self) -> int:
        return 1


def test_extra_state_has_no_type() -> None:
    with pytest.raises(ValueError, match="extra state"):
        global_state_dict(WithExtra())


def test_tied_and_wrapped_modules_keep_their_names() -> None:
    first, second = One({"tp": I}, torch.ones(2)), One(None, torch.ones(2))
    second.weight = first.weight
    tied = nn.Sequential(first, checkpoint_wrapper(second))
    with set_current_mesh({"tp": 2}):
        state = global_state_dict(tied)
        assert list(state) == ["0.weight", "1.weight"]
        load_global_state_dict(tied, state)


def under_fsdp() -> tuple[Tensor, Tensor]:
    mesh = device_mesh()
    value = torch.arange(12.0).view(4, 3)
    layer = nn.Linear(3, 2, bias=False)
    declare(layer, {"weight": {"dp": R, "tp": S(0)}})
    fully_shard(layer, mesh=mesh["dp"])
    with set_current_mesh(mesh):
        load_global_state_dict(layer, {"weight": value})
        weight: Any = layer.weight
        return weight.full_tensor(), global_state_dict(layer)["weight"]


def test_parameters_that_fsdp2_shards() -> None:
    value = torch.arange(12.0).view(4, 3)
    for rank, (piece, whole) in enumerate(run_ranks({"dp": 2, "tp": 2}, under_fsdp)):
        assert torch.equal(whole, value)
        assert torch.equal(piece, value[2 * (rank % 2) : 2 * (rank % 2) + 2])
