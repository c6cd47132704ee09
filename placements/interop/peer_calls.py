"""The one table of calls: which call of `spmd_types` each typed call of ours is.

What differs between the two is written out here: which argument says the dim of a row per
rank, equal runs of an exchange, and rows that are cut in several runs.
"""

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import spmd_types
import torch
import torch.distributed as dist
from torch import Tensor

from placements.interop.spmd_types import axis_type_to_peer
from placements.types.axis import AxisType, Shard
from placements.types.extents import Folded
from placements.types.mesh import Mesh

_peer = cast(Any, spmd_types)
_transport = cast(Any, importlib.import_module("spmd_types._dist"))


class _Call(NamedTuple):
    """A call of the peer, and how it differs from ours of that name."""

    function: Any
    row_dim: str | None = None  # the argument for the dim that a row per rank has
    fixed: Mapping[str, Any] = {}


_EXPERT = {"expert_mode": True}  # which casts are meant is in our types
_CALLS: Mapping[str, _Call] = {
    "all_reduce": _Call(_peer.all_reduce),
    "all_gather": _Call(_peer.all_gather, "gather_dim"),
    "reduce_scatter": _Call(_peer.reduce_scatter, "scatter_dim"),
    "all_to_all": _Call(_peer.all_to_all),
    "redistribute": _Call(_peer.redistribute),
    "convert": _Call(_peer.convert, fixed=_EXPERT),
    "reinterpret": _Call(_peer.reinterpret, fixed=_EXPERT),
}
_DTYPES = ("op_dtype", "out_dtype", "backward_options")


def moved(
    mesh: Mesh,
    call: str,
    x: Tensor,
    axis: Any,
    types: list[AxisType],
    *,
    dtypes: tuple[Any, Any, Any],
    new_dim: int,
    sends: Any,
    receives: Any,
) -> Tensor:
    """Carry out a call by the peer's call of that name; `types` are src and dst."""
    said = _CALLS[call]
    options = {n: o for n, o in zip(_DTYPES, dtypes, strict=True) if o is not None}
    if said.row_dim is not None and "V" in (types[0].letter, types[1].letter):
        options[said.row_dim] = new_dim
    if call == "all_to_all" and all(t.letter == "V" for t in types):
        # The peer's call without sizes is for one row per rank.
        ranks = mesh.require(axis)
        equal = [x.shape[0] // ranks] * ranks
        options["input_split_sizes"] = list(sends or equal)
        options["output_split_sizes"] = list(receives or equal)
    elif sends is not None or receives is not None:
        raise ValueError("split sizes go with src=V, dst=V: rows change ranks")
    x, types, folded = _unfolded(x, types)
    peers = {n: axis_type_to_peer(t) for n, t in zip(("src", "dst"), types, strict=True)}
    moved = said.function(x.contiguous(), axis, **peers, **said.fixed, **options)
    return moved if folded is None else moved.flatten(folded, folded + 1)


def _unfolded(
    x: Tensor, types: list[AxisType]
) -> tuple[Tensor, list[AxisType], int | None]:
    """Write rows that are cut in several runs as two dims, of which the inner is cut."""
    folded = {
        (t.dim, t.extent.outer)
        for t in types
        if isinstance(t, Shard) and isinstance(t.extent, Folded)
    }
    if not folded:
        return x, types, None
    (dim, outer), *others = folded
    if others:
        raise ValueError("spmd_types cannot cut two dims that are folded in one call")
    inner: list[AxisType] = []
    for t in types:
        if not isinstance(t, Shard):
            inner.append(t)
        elif t.dim != dim:
            inner.append(Shard(t.dim + (t.dim > dim), t.extent))
        else:
            extent = t.extent.inner if isinstance(t.extent, Folded) else t.extent
            inner.append(Shard(dim + 1, extent))
    return cast(Any, x).unflatten(dim, (outer, -1)), inner, dim


class _Sends:
    """torch.distributed for the peer, which sends runs of unequal length as a list.

    gloo takes those as one tensor with split sizes alone.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @staticmethod
    def all_to_all(received: list[Tensor], sent: list[Tensor], group: Any = None) -> None:
        lengths = [[len(x) for x in rows] for rows in (received, sent)]
        unequal = any(len(set(rows)) > 1 for rows in lengths)
        if not unequal or dist.get_backend(group) != "gloo":
            cast(Any, dist).all_to_all(received, sent, group=group)
            return
        rows = torch.cat(received)
        cast(Any, dist).all_to_all_single(rows, torch.cat(sent), *lengths, group=group)
        for run, arrived in zip(received, cast(Any, rows).split(lengths[0]), strict=True):
            run.copy_(arrived)


def send_unequal_runs() -> None:
    """Let the peer exchange runs of unequal length on gloo, in this process, for good."""
    if _transport.dist is dist:
        _peer.set_dist(_Sends())
