"""Declare the parameters of somebody else's module, and keep this rank's pieces of them.

A module that was written for one device holds whole parameters. `hold_pieces` replaces each
of them by the piece that its declared type gives to this rank, and the module's own code
then computes with pieces. `move_at` says which collectives run at the module's boundaries.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from placements._torch import unseen
from placements.annotations.declarations import by_whole_name, declare
from placements.runtime.mesh import checked_mesh
from placements.runtime.state import suspended
from placements.types.axis import Shard, TypesLike
from placements.types.meaning import piece_of
from placements.types.mesh import Mesh
from placements.types.text import as_axis_type


def hold_pieces(module: nn.Module, types: Mapping[str, TypesLike]) -> None:
    """Declare all parameters and buffers of a module, and keep this rank's pieces.

    The keys of `types` are names as for `declare`: `"*.q_proj.weight"` stands for many. The
    first key that fits a name holds, so a last key `"*"` stands for all the others. Before
    the call every rank holds the whole values. A parameter that is cut becomes a new
    parameter, so make the optimizer afterwards.
    Communicates nothing. Raises ValueError, before anything is changed, if nothing is said
    of a tensor, if a key fits no name, or if a type does not fit its tensor.
    """
    mesh = checked_mesh()
    held = list(_held(module))
    given = by_whole_name(module, types)
    left_out = [name for name, _, _ in held if name not in given]
    if left_out:
        raise ValueError(
            f"hold_pieces: nothing is said of {left_out[0]!r}; a last key '*' stands for "
            "all the others"
        )
    pieces: dict[int, Tensor] = {}  # a tensor that has several names stays one tensor
    with unseen(), suspended(), torch.no_grad():
        for name, owner, leaf in held:
            whole: Tensor = getattr(owner, leaf)
            if id(whole) not in pieces:
                pieces[id(whole)] = _piece(name, whole, given[name], mesh)
        for _, owner, leaf in held:
            setattr(owner, leaf, pieces[id(getattr(owner, leaf))])
    declare(module, given)


def _held(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield each parameter and buffer: its full name, its module, its name there."""
    modules = cast(Any, module).named_modules()
    for prefix, owner in cast(Iterable[tuple[str, nn.Module]], modules):
        parameters = owner.named_parameters(recurse=False, remove_duplicate=False)
        buffers = owner.named_buffers(recurse=False, remove_duplicate=False)
        for leaf, _ in [*parameters, *buffers]:
            yield (f"{prefix}.{leaf}" if prefix else leaf), owner, leaf


def _piece(name: str, whole: Tensor, types: TypesLike, mesh: Mesh) -> Tensor:
    """This rank's piece in memory of its own; the tensor itself if nothing cuts it."""
    given = {a: as_axis_type(t) for a, t in types.items() if mesh.sizes.get(a, 1) > 1}
    for axis, t in given.items():
        if t.letter not in "RIS":
            raise ValueError(
                f"hold_pieces: {name!r} is to be {t!r} on axis {axis!r}, and a whole value "
                "has no such piece; the types of pieces are Replicate, Invariant and Shard"
            )
    cuts = {axis: t for axis, t in given.items() if isinstance(t, Shard)}
    for dim in {t.dim for t in cuts.values()}:
        evenly = [a for a, t in cuts.items() if t.dim == dim and t.extent is None]
        ranks = math.prod(mesh.sizes[axis] for axis in evenly)
        if -whole.dim() <= dim < whole.dim() and whole.shape[dim] % ranks:
            rows = whole.shape[dim]
            raise ValueError(
                f"hold_pieces: dim {dim} of {name!r} has {rows} rows, which the {ranks} "
                f"ranks of {evenly} cannot hold evenly; say how they are cut, such as "
                f"S({dim}, Padded({rows}))"
            )
    try:
        piece = piece_of(whole, types, mesh)
    except ValueError as error:
        raise ValueError(f"hold_pieces: {name!r}: {error}") from None
    if not cuts:
        return whole
    if isinstance(whole, nn.Parameter):
        return nn.Parameter(piece, whole.requires_grad)
    return piece
