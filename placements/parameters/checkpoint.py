"""Save a module's global values and load them on any mesh, by the declared types.

A name stands for one global value, the same whichever ranks held it: pieces are joined
by their extents, so no rank's piece can take another's place. On the other mesh each
rank takes its piece of the value, in place: what refers to a tensor still does.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from placements._torch import unseen
from placements.collectives.objects import from_all_ranks
from placements.collectives.transport import gather_pieces, stack_all, sum_over
from placements.parameters.alike import check_alike
from placements.parameters.held import (
    Held,
    Meshes,
    meshes_or_current,
    ranks_of,
    saved_tensors,
)
from placements.runtime.dtensors import local_part
from placements.runtime.errors import refused
from placements.runtime.state import suspended
from placements.types.axis import Shard
from placements.types.meaning import take_piece
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType


def global_state_dict(module: nn.Module, *, meshes: Meshes = None) -> dict[str, Tensor]:
    """Parameters and persistent buffers -> their global values by name, on every rank.

    Shard: the pieces joined. Partial: the sum. Varying: all ranks' values, stacked on a
    leading dim for each such axis. The tensors are copies. `meshes` as for
    `reduce_gradients`.
    Communicates: all-gathers over the axes that split a tensor; what is compared.
    Raises PlacementError if ranks disagree on a value that one name stands for.
    """
    call = "global_state_dict"
    known = meshes_or_current(call, meshes)
    with unseen(), suspended(), torch.no_grad():
        held = saved_tensors(call, module, known)
        mine = {one.name: (str(one.tensor.dtype), *_described(one)) for one in held}
        rule = "one name is one global value, so all ranks agree on its extents"
        check_alike(call, known[0], mine, rule=rule)
        values = {one.name: _joined(one).detach() for one in held}
        _compare_values(call, held, values, known[0])
    return values


def load_global_state_dict(
    module: nn.Module, state: Mapping[str, Tensor], *, meshes: Meshes = None
) -> None:
    """Global values by name -> this rank's parameters and buffers, written in place.

    The module may be on another mesh than the one that saved. Nothing is written unless
    everything fits. Communicates: nothing.
    Raises ValueError that names the tensors that are missing, left over, or do not fit.
    """
    call = "load_global_state_dict"
    with unseen(), suspended(), torch.no_grad():
        held = saved_tensors(call, module, meshes_or_current(call, meshes))
        _check_names(call, {one.name for one in held}, set(state))
        pieces = [_piece(call, one, state[one.name]) for one in held]
        for one, piece in zip(held, pieces, strict=True):
            _write(one.tensor, piece)


def _joined(held: Held) -> Tensor:
    mesh, tensor = held.type.mesh, cast(Any, held.tensor)
    # A DTensor joins its pieces on its own axes itself.
    value: Tensor = tensor.full_tensor() if local_part(tensor)[1] else tensor.clone()
    for axis in reversed(list(held.type)):
        t = held.type[axis]
        if isinstance(t, Shard):
            assert t.extent is not None
            value = gather_pieces(ranks_of(mesh, axis), value, t.dim, t.extent)
        elif t.letter == "P":
            value = sum_over(ranks_of(mesh, axis), value)
    # Stacked last, each in front of the one before, so that they come in mesh order.
    for axis in reversed(mesh.axes):
        if held.type[axis].letter == "V":
            value = stack_all(ranks_of(mesh, axis), value)
    return value


def _piece(call: str, held: Held, value: Tensor) -> Tensor:
    """This rank's part of a global value."""
    found = held.type
    mesh = found.mesh
    expected = _global_shape(held)
    if tuple(value.shape) != expected:
        raise ValueError(
            f"{call}: {held.name!r} is {list(value.shape)}, but {found!r} on {mesh!r} "
            f"makes {list(expected)} of the {list(held.tensor.shape)} here"
        )
    for axis in mesh.axes:
        if found[axis].letter == "V":
            value = value[mesh.place[axis]]
    for axis, t in found.items():
        if isinstance(t, Shard):
            assert t.extent is not None
            value = take_piece(value, t.dim, t.extent, mesh.place[axis])
        elif t.letter == "P" and mesh.place[axis] != 0:
            value = torch.zeros_like(value)
    return value


def _write(tensor: Tensor, piece: Tensor) -> None:
    if not local_part(tensor)[1]:
        tensor.copy_(piece)
        return
    from torch.distributed.tensor import distribute_tensor  # only where it is in use

    own = cast(Any, tensor)
    tensor.copy_(distribute_tensor(piece, own.device_mesh, own.placements))


def _global_shape(held: Held) -> tuple[int, ...]:
    found = held.type
    stacked = [found.mesh.sizes[a] for a in found.mesh.axes if found[a].letter == "V"]
    return (*stacked, *found.global_shape(tuple(held.tensor.shape)))


def _check_names(call: str, mine: set[str], given: set[str]) -> None:
    if mine == given:
        return
    parts = [
        f"{word} {sorted(names)}"
        for word, names in (("missing", mine - given), ("left over", given - mine))
        if names
    ]
    raise ValueError(f"{call}: the names do not fit the module: {', '.join(parts)}")


def _described(held: Held) -> tuple[object, ...]:
    found: TensorType = held.type
    # An inner cut may differ from one outer rank to the next; the whole may not.
    return (
        _global_shape(held),
        tuple((axis, t.letter) for axis, t in found.items()),
    )


def _compare_values(
    call: str, held: list[Held], values: dict[str, Tensor], mesh: Mesh
) -> None:
    digests = from_all_ranks(mesh, {name: _digest(value) for name, value in values.items()})
    for one in held:
        by_digest: dict[str, list[int]] = {}
        for rank, of_rank in digests.items():
            by_digest.setdefault(of_rank[one.name], []).append(rank)
        if len(by_digest) > 1:
            groups = " and ".join(f"ranks {ranks}" for ranks in by_digest.values())
            raise refused(
                call,
                f"{one.name!r} is not the same on {groups}, though it is declared "
                f"{one.type!r}",
                name=one.name,
                expected="equal values",
                actual=groups,
                rule="only equal values share a name; where ranks hold values of their "
                "own the type is Shard or Varying",
                advice="declare what it is; if it should be equal, some gradient or "
                "update was not reduced (reduce_gradients, verify())",
            )


def _digest(value: Tensor) -> str:
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=16).hexdigest()
