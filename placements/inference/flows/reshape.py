"""Flows of reshapes: which dim of the result a cut goes with, and how it cuts it.

A view is judged on the global program: rank r must hold the r-th piece of what the same
line makes on one device. The elements of a tensor stand in a row, and a cut takes equal
runs out of equal blocks of that row; a dim of the result can be cut so if blocks and runs
are multiples of what stands before and behind it. Where several dims can, the cut goes
with the dim whose size was read from a dim cut by that axis, else with the dim written as
-1, and else the view is refused, because sizes alone do not tell.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from placements.inference.combine import combine
from placements.inference.flows.groups import view_of_pads
from placements.inference.flows.views import moved, view_of_cuts
from placements.inference.op import Op
from placements.inference.sizes import Size, is_foreign, sizes_of
from placements.inference.terms import Label, Mixed, Operand, Refusal, Term
from placements.types.axis import Shard, V
from placements.types.extents import Extent, Folded, fold
from placements.types.padding import Groups, repeated
from placements.types.tensor import TensorType


def reshape(
    op: Op, input: Operand, size: Any = None, shape: Any = None, dtype: Any = None
) -> TensorType:
    if dtype is not None:
        raise Refusal("view(dtype) re-reads the bytes; use .to(dtype)", operand=input)
    sizes = sizes_of(shape if size is None else size)
    if _keeps_cuts(input, sizes):
        return view_of_cuts(op, input, lambda _, dim, extent: (dim, extent), lambda _: None)
    _check_sizes(input, sizes)
    whole = tuple(range(input.ndim)), tuple(range(len(sizes)))
    return _viewed(op, input, sizes, [whole])


def _keeps_cuts(input: Operand, sizes: Sequence[Size]) -> bool:
    """Whether all dims up to the last that is cut stay, and say so: no arithmetic then."""
    kept = max(input.type.cut_dims, default=-1) + 1
    if input.type.pads or kept > len(sizes):
        return False
    for dim, size in enumerate(sizes):
        cuts = input.type.cuts(dim) if dim < kept else ()
        if size.varying or size.cuts != cuts:
            return False
        if dim < kept and (size.rows != input.shape[dim] or size.rows == 0):
            return False
    return all(extent.equal_sizes for size in sizes for _, extent in size.cuts)


def flatten(op: Op, input: Operand, start_dim: int = 0, end_dim: int = -1) -> TensorType:
    if input.ndim == 0:
        return moved(op, input, ())
    first, last = start_dim % input.ndim, end_dim % input.ndim
    groups: Groups = [
        *(((d,), (d,)) for d in range(first)),
        (tuple(range(first, last + 1)), (first,)),
        *(((d,), (d - last + first,)) for d in range(last + 1, input.ndim)),
    ]
    kept = sizes_of(input)
    sizes = [*kept[:first], Size(-1), *kept[last + 1 :]]
    return _viewed(op, input, sizes, groups)


def unflatten(op: Op, input: Operand, dim: int, sizes: Sequence[int]) -> TensorType:
    dim, count = dim % input.ndim, len(sizes)
    parts, kept = sizes_of(sizes), sizes_of(input)
    shape = [*kept[:dim], *parts, *kept[dim + 1 :]]
    groups: Groups = [
        *(((d,), (d,)) for d in range(dim)),
        ((dim,), tuple(range(dim, dim + count))),
        *(((d,), (d + count - 1,)) for d in range(dim + 1, input.ndim)),
    ]
    _check_sizes(input, parts)
    return _viewed(op, input, shape, groups)


def _shape(input: Operand, sizes: Sequence[Size], groups: Groups) -> tuple[int, ...]:
    """The sizes with the -1 filled in; a dim of another group may have no rows here."""
    shape = [size.rows for size in sizes]
    for olds, news in groups:
        known = math.prod(shape[j] for j in news if shape[j] != -1)
        rest = math.prod(input.shape[d] for d in olds) // known if known else 0
        for j in news:
            shape[j] = rest if shape[j] == -1 else shape[j]
    return tuple(shape)


def _largest(size: Size) -> int:
    """The rows of the largest piece of a dim that is cut."""
    return max(size.cuts[-1][1].sizes) if size.cuts else size.rows


def _check_sizes(input: Operand, sizes: Sequence[Size]) -> None:
    """Sizes that differ by rank fit a tensor that is cut so, or that differs by rank."""
    free = any(size.rows == -1 for size in sizes)
    letters = {axis: t.letter for axis, t in input.type.items()}
    for size in sizes:
        for axis, extent in size.cuts if free else ():
            if 0 in extent.sizes:
                raise Refusal(
                    "a rank has no rows of that size, and torch does not know what -1 is "
                    "beside a size of zero",
                    axis, input, "all sizes in numbers, without -1",
                )  # fmt: skip
        if is_foreign(size, input.type.mesh) and set(letters.values()) - {"V"}:
            raise Refusal(
                "a size that was read on another mesh may differ on every axis of this one",
                None, input, "plain sizes, -1, or sizes that were read on this mesh",
            )  # fmt: skip
        for axis in (*size.varying, *dict(size.cuts)):
            letter = letters.get(axis, "V")
            if letter == "V" or (letter == "S" and axis not in size.varying):
                continue
            raise Refusal(
                "a size that differs by rank would give every rank a different shape",
                axis, input, "plain sizes, -1, or sizes of dims that are cut so",
            )  # fmt: skip


def _viewed(op: Op, input: Operand, sizes: list[Size], groups: Groups) -> TensorType:
    """The view in which every cut finds its dim among the new dims of its group.

    It is judged by the sizes of the rank with the largest piece, since a rank that has no
    rows cannot tell where they would go, and all ranks must say the same.
    """
    input = replace(input, shape=tuple(map(_largest, sizes_of(input))))
    sizes = [replace(size, rows=_largest(size)) for size in sizes]
    group_of = {dim: (olds, news) for olds, news in groups for dim in olds}
    # Sizes with the cuts that were placed so far undone, since the cuts further out count
    # the rows that the cuts further in share.
    shape = _shape(input, sizes, groups)
    old, new = list(input.shape), list(shape)
    _check_count(input, shape, groups)

    def place(axis: str, dim: int, extent: Extent) -> tuple[int, Extent]:
        olds, news = group_of[dim]
        if len(news) == len(olds) == 1 and axis in dict(sizes[news[0]].cuts):
            found = news[0], extent
        else:
            found = _place(axis, dim, extent, olds, news)
        old[dim], new[found[0]] = extent.total, found[1].total
        return found

    def _place(
        axis: str, dim: int, extent: Extent, olds: tuple[int, ...], news: tuple[int, ...]
    ) -> Any:
        # Dims of other groups do not count: a rank may have no rows of them.
        blocks = math.prod(old[d] for d in olds if d < dim)
        runs = extent
        if isinstance(extent, Folded):
            blocks, runs = blocks * extent.outer, extent.inner
        behind = math.prod(old[d] for d in olds if d > dim)
        rank = input.type.mesh.place[axis]
        if axis == input.cut_axes(dim)[-1]:
            rank = extent.sizes.index(max(extent.sizes))
        is_empty = 0 in (blocks, extent.total, behind)
        fitting: list[tuple[int, Extent]] = []
        for j in news:
            before = math.prod(new[k] for k in news if k < j)
            after = math.prod(new[k] for k in news if k > j)
            part = _of_rows(runs, behind, after)
            if (blocks % before if before else blocks) or part is None:
                continue
            if _is_merged_unevenly(input, [d for d in olds if d < dim], sizes[:j]):
                continue
            whole = fold(blocks // before if before else 1, part)
            if whole.local_size(rank) != new[j]:
                continue
            follows = sizes[j].rows == -1 or axis in dict(sizes[j].cuts)
            said = dict(sizes[j].cuts).get(axis, whole)
            if said.sizes != whole.sizes:
                continue  # the size was read from a dim that is cut otherwise
            if not follows and not whole.equal_sizes:
                continue  # the number is the same on all ranks of the axis
            if not follows and is_empty and whole.total != new[j]:
                continue  # nothing has any shape, so this number is that of one device
            fitting.append((j, whole))
        if is_empty:
            # No elements can be cut in every way, so the size that was read says in which.
            for j in set(news) - {fit for fit, _ in fitting}:
                said = dict(sizes[j].cuts).get(axis)
                if said is not None and said.local_size(rank) == new[j]:
                    fitting.append((j, said))
        # A dim that was folded is split again where it was folded, if it can be.
        plain = [found for found in fitting if not isinstance(found[1], Folded)]
        return _chosen(input, axis, dim, extent, sizes, fitting, plain)

    pads = view_of_pads(input, shape, sizes, groups)
    found = view_of_cuts(op, input, place, pads)
    _check_said(input, found, sizes)
    return found


def _check_count(input: Operand, shape: tuple[int, ...], groups: Groups) -> None:
    """Refuse on all ranks what torch would not take of some: of those without rows, say."""
    cuts = [cut for dim in input.type.cut_dims for cut in input.type.cuts(dim)]
    uneven = next((axis for axis, extent in cuts if not extent.equal_sizes), None)
    if uneven is None or V in input.type.types:
        return  # torch says the same on all ranks, or they differ anyway
    for olds, news in groups:
        if math.prod(shape[j] for j in news) != math.prod(input.shape[d] for d in olds):
            raise Refusal(
                f"pieces of up to {input.shape} do not have the elements of {shape}",
                uneven, input, "sizes that fit the pieces of all ranks",
            )  # fmt: skip


def _check_said(input: Operand, found: TensorType, sizes: Sequence[Size]) -> None:
    """Refuse a size of a piece for a dim that is not cut: on one device it is larger."""
    for dim, size in enumerate(sizes):
        for axis, extent in size.cuts:
            t = found.by_axis.get(axis, V)
            if t == V:
                continue
            if isinstance(t, Shard) and t.dim == dim and t.extent is not None:
                if t.extent.sizes == extent.sizes:
                    continue
            raise Refusal(
                f"dim {dim} of the view has the size of a piece, and the pieces of the "
                "whole are cut along another dim",
                axis, input, "sizes of which one is that of the piece",
            )  # fmt: skip


def _is_merged_unevenly(
    input: Operand, dims: Sequence[int], before: Sequence[Size]
) -> bool:
    """Whether ranks would fold different numbers of blocks, so that types would differ."""
    for d in dims:
        for axis, extent in input.type.cuts(d):
            kept = any(size.rows == -1 or axis in dict(size.cuts) for size in before)
            if not extent.equal_sizes and not kept:
                return True
    return False


def _of_rows(runs: Extent, behind: int, after: int) -> Extent | None:
    """Runs of rows with `behind` elements each, as runs of rows with `after` elements."""
    if behind == after:
        return runs
    scaled = runs if behind == 1 else runs.scaled(behind)
    return scaled if after in (0, 1) or not behind else scaled.divided(after)


def _chosen(
    input: Operand,
    axis: str,
    dim: int,
    extent: Extent,
    sizes: Sequence[Size],
    fitting: Sequence[tuple[int, Extent]],
    unfolded: Sequence[tuple[int, Extent]],
) -> tuple[int, Extent]:
    """The one dim that the cut goes with."""
    said = [j for j, size in enumerate(sizes) if axis in dict(size.cuts)]
    rest = [j for j, size in enumerate(sizes) if size.rows == -1]
    # Beside a -1, plain sizes mean on one device what they say, so none is that of a piece.
    named = said or rest
    for found in (fitting, unfolded):
        chosen = [one for one in found if not named or one[0] in named]
        if len(chosen) == 1:
            return chosen[0]
    shape = tuple(size.rows for size in sizes)
    if fitting and not said:
        reason = (
            f"sizes {shape} do not tell which dim the cut of dim {dim} goes with: "
            f"{' or '.join(str(j) for j, _ in fitting)}"
        )
    else:
        reason = (
            f"the pieces {extent!r} cannot be said of dims of sizes {shape}; split the dim "
            "where it was flattened"
        )
    raise Refusal(
        reason,
        axis,
        input,
        "a view that keeps the cut dim apart: write its size as -1, or read it from a "
        "tensor that is cut so (y.shape[0])",
    )


def repeat_interleave(
    op: Op,
    input: Operand | None = None,
    repeats: Any = None,
    dim: int | None = None,
    output_size: Any = None,
) -> TensorType:
    """Every row `repeats` times in place, so the pieces grow by that factor."""
    if input is None:
        raise Refusal("repeat_interleave(repeats) alone makes rows that depend on data")
    if dim is None:
        if input.ndim != 1:
            flat_type = flatten(op, input)
            input = Operand(
                flat_type, (math.prod(input.shape),), input.dtype, input.position
            )
        dim = 0
    along = dim % input.ndim
    if isinstance(repeats, int):

        def grown(axis: str, d: int, extent: Extent) -> tuple[int, Extent]:
            return d, extent.scaled(repeats) if d == along else extent

        return view_of_cuts(op, input, grown, lambda pads: repeated(pads, along, repeats))
    reason = "how often each row is repeated depends on data, so the pieces are unknown"
    labels: list[Label] = [d if d != along else Mixed(reason) for d in range(input.ndim)]
    terms = [Term(input, tuple(labels))]
    if isinstance(repeats, Operand):
        terms.append(Term(repeats, (Mixed(reason),) * repeats.ndim, is_control=True))
    return combine(op.linearity, terms, index=input.type.index)
