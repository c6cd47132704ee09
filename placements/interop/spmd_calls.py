"""The collectives and casts with the arguments of `spmd_types`, done by ours.

`expert_mode` unlocks nothing here, as every transition may be written. What a call cannot
do here, it refuses, and says what to write.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

import placements as pl
from placements import I, P, R, V
from placements.types.axis import AxisType, Shard
from placements.types.extents import Ragged

_INSTEAD = {
    "async_op": "for an exchange all_to_all_start(...).wait(); else without async_op",
    "inplace": "use the result, x = all_reduce(x, ...): a type does not change in place",
}


def _options(call: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options that ours takes, too: the dtypes."""
    found = {name: value for name, value in given.items() if value not in (None, False)}
    found.pop("expert_mode", None)
    backward: dict[str, Any] | None = found.get("backward_options")
    both: dict[str, Any] = {**(backward or {}), **found}
    for name, value in both.items():
        if name in _INSTEAD and value:
            raise NotImplementedError(f"{call}: no {name}; {_INSTEAD[name]}")
    if backward is not None:
        found["backward_options"] = {n: v for n, v in backward.items() if n != "async_op"}
    return found


def _cut(t: AxisType, sizes: Sequence[int] | None) -> AxisType:
    """Return a Shard whose pieces have these lengths."""
    return Shard(t.dim, Ragged(*sizes)) if sizes and isinstance(t, Shard) else t


def all_reduce(
    x: Tensor, axis: Any, *, src: AxisType = P, dst: AxisType, **o: Any
) -> Tensor:
    return pl.all_reduce(x, axis, src=src, dst=dst, **_options("all_reduce", o))


def all_gather(
    x: Tensor,
    axis: Any,
    *,
    src: AxisType = V,
    dst: AxisType,
    gather_dim: int | None = None,
    split_sizes: Sequence[int] | None = None,
    **o: Any,
) -> Tensor:
    o = _options("all_gather", o)
    src = _cut(src, split_sizes)
    return pl.all_gather(x, axis, src=src, dst=dst, gather_dim=gather_dim, **o)


def reduce_scatter(
    x: Tensor,
    axis: Any,
    *,
    src: AxisType = P,
    dst: AxisType = V,
    scatter_dim: int | None = None,
    split_sizes: Sequence[int] | None = None,
    **o: Any,
) -> Tensor:
    o = _options("reduce_scatter", o)
    dst = _cut(dst, split_sizes)
    return pl.reduce_scatter(x, axis, src=src, dst=dst, scatter_dim=scatter_dim, **o)


def all_to_all(
    x: Tensor,
    axis: Any,
    *,
    src: AxisType = V,
    dst: AxisType = V,
    split_dim: int | None = None,
    concat_dim: int | None = None,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    **o: Any,
) -> Tensor:
    """Exchange; of unrelated values the rows of `split_dim`, stacked on `concat_dim`."""
    o = _options("all_to_all", o)
    if output_split_sizes is not None or input_split_sizes is not None:
        o["output_split_sizes"] = output_split_sizes
        o["input_split_sizes"] = input_split_sizes
    if src == V and dst == V:
        rows = pl.all_to_all(x.movedim(split_dim or 0, 0), axis, src=src, dst=dst, **o)
        return rows.movedim(0, concat_dim or 0)
    return pl.all_to_all(x, axis, src=src, dst=dst, **o)


def redistribute(x: Tensor, axis: Any, *, src: AxisType, dst: AxisType, **o: Any) -> Tensor:
    return pl.redistribute(x, axis, src=src, dst=dst, **_options("redistribute", o))


def convert(x: Tensor, axis: Any, *, src: AxisType, dst: AxisType, **o: Any) -> Tensor:
    return pl.convert(x, axis, src=src, dst=dst, **_options("convert", o))


def reinterpret(x: Tensor, axis: Any, *, src: AxisType, dst: AxisType, **o: Any) -> Tensor:
    """Ours, and R <-> I, I -> V and I -> P by way of `convert`, as there."""
    o = _options("reinterpret", o)
    if src == I and dst != I:
        x, src = pl.convert(x, axis, src=I, dst=R), R
    if src == R and dst == I:
        return pl.convert(x, axis, src=R, dst=I, **o)
    return pl.reinterpret(x, axis, src=src, dst=dst, **o)


def shard(x: Tensor, axis: Any, *, src: AxisType, dst: AxisType, **o: Any) -> Tensor:
    return convert(x, axis, src=src, dst=dst, **o)


def unshard(x: Tensor, axis: Any, *, src: AxisType, dst: AxisType, **o: Any) -> Tensor:
    return all_gather(x, axis, src=src, dst=dst, **o)


def invariant_to_replicate(x: Tensor, axis: Any, **o: Any) -> Tensor:
    return convert(x, axis, src=I, dst=R, **o)
