"""Multiply each group's rows by its own matrix: one op, and the loop that defines it.

`F.grouped_mm` where it can be used (it wants 16-byte strides and no float64), else the
loop; both give the same numbers. The backward is the same op with the matrices
transposed, and one outer product per group, so a group without rows gets the gradient
zero, not None. To the checker the op is what `grouped_mm` is. Both look at the ends of the
groups, so in compiled code each is one op of the graph.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as torch itself writes it
from torch import Tensor

from placements import in_transform, register_op
from spmd_moe.compute.products import is_widened, product
from spmd_moe.permute import is_dispatched, on_host
from spmd_moe.precision import autocast_dtype, without_autocast

_NAME, _OUTER_NAME = "spmd_moe::grouped_mm", "spmd_moe::grouped_outer"


@torch.library.custom_op(_NAME, mutates_args=())
def _grouped_mm(rows_MK: Tensor, matrices_GKN: Tensor, ends_G: Tensor) -> Tensor:
    return _forward(rows_MK, matrices_GKN, ends_G)


@torch.library.custom_op(_OUTER_NAME, mutates_args=())
def _grouped_outer(rows_MK: Tensor, grads_MN: Tensor, ends_G: Tensor) -> Tensor:
    return _outer(rows_MK, grads_MN, ends_G)


register_op(_NAME, like="grouped_mm")


def grouped_mm(rows_MK: Tensor, matrices_GKN: Tensor, ends_G: Tensor) -> Tensor:
    """rows (M, K), one matrix (K, N) per group, last row + 1 of each group -> (M, N).

    Under autocast it is computed in autocast's dtype, as the matrix products of torch are.
    """
    check_integers("the ends of the groups", ends_G)
    check_groups(ends_G.shape[0], matrices_GKN.shape[0])
    rows_MK, matrices_GKN = in_autocast_dtype(rows_MK, matrices_GKN)
    if in_transform():  # transforms have no derivatives of an op that is not torch's own
        with without_autocast(rows_MK):
            return grouped_mm_by_loop(rows_MK, matrices_GKN, ends_G)
    return _grouped_mm(rows_MK, matrices_GKN, ends_G)


def in_autocast_dtype(rows: Tensor, *matrices: Tensor) -> tuple[Tensor, ...]:
    """Return the operands of a product in the dtype of autocast; they must have one."""
    cast = tuple(x.to(autocast_dtype(x) or x.dtype) for x in (rows, *matrices))
    for matrix in cast[1:]:
        if matrix.dtype != cast[0].dtype:
            raise TypeError(
                f"the rows are {cast[0].dtype} and the matrices {matrix.dtype}, but they "
                "must have one dtype: cast the input or the module, or use torch.autocast"
            )
    return cast


def ends_of(counts_G: Tensor) -> Tensor:
    """How many rows each group has -> last row + 1 of each, as `grouped_mm` takes them."""
    check_integers("the counts", counts_G)
    return counts_G.cumsum(0, dtype=torch.int32)


def check_integers(what: str, x: Tensor) -> None:
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(
            f"{what} are {x.dtype}, but they must be integers, such as torch.int64: they "
            "say how many rows there are"
        )


def check_groups(groups: int, matrices: int) -> None:
    """Raise ValueError unless there is one matrix for each group of rows."""
    if groups != matrices:
        raise ValueError(f"{groups} groups of rows, but {matrices} matrices")


def grouped_mm_by_loop(rows_MK: Tensor, matrices_GKN: Tensor, ends_G: Tensor) -> Tensor:
    """Define the op: one product for each group that has rows."""
    out_MN = rows_MK.new_empty(rows_MK.shape[0], matrices_GKN.shape[2])
    for group, (start, end) in enumerate(_spans(ends_G, rows_MK.shape[0])):
        if end > start:
            _multiply(rows_MK[start:end], matrices_GKN[group], out_MN[start:end])
    return out_MN


def _forward(rows_MK: Tensor, matrices_GKN: Tensor, ends_G: Tensor) -> Tensor:
    with without_autocast(rows_MK):  # the caller has already cast to autocast's dtype
        return _product(rows_MK, matrices_GKN, ends_G)


def _product(rows_MK: Tensor, matrices_GKN: Tensor, ends_G: Tensor) -> Tensor:
    if rows_MK.is_meta:
        return _shape(rows_MK, matrices_GKN, ends_G)
    if _fits(rows_MK) and _fits(matrices_GKN) and rows_MK.shape[0] > 0:
        if rows_MK.device.type == "cpu":  # elsewhere a look at the ends would wait for them
            _spans(ends_G, rows_MK.shape[0])
        # Rows of a size that is no multiple of 16 bytes come with gaps in between.
        return F.grouped_mm(rows_MK, matrices_GKN, offs=ends_G).contiguous()
    return grouped_mm_by_loop(rows_MK, matrices_GKN, ends_G)


def _outer(rows_MK: Tensor, grads_MN: Tensor, ends_G: Tensor) -> Tensor:
    """Compute the gradient of the matrices: rows^T @ grads of each group."""
    with without_autocast(rows_MK):
        return _outer_product(rows_MK, grads_MN, ends_G)


def _outer_product(rows_MK: Tensor, grads_MN: Tensor, ends_G: Tensor) -> Tensor:
    if rows_MK.is_meta:
        return _outer_shape(rows_MK, grads_MN, ends_G)
    rows_KM = rows_MK.mT
    if _fits(rows_KM) and _fits(grads_MN) and rows_MK.shape[0] > 0:
        return F.grouped_mm(rows_KM, grads_MN, offs=ends_G).contiguous()
    out_GKN = rows_MK.new_zeros(ends_G.shape[0], rows_MK.shape[1], grads_MN.shape[1])
    for group, (start, end) in enumerate(_spans(ends_G, rows_MK.shape[0])):
        if end > start:
            _multiply(rows_KM[:, start:end], grads_MN[start:end], out_GKN[group])
    return out_GKN


def _spans(ends_G: Tensor, rows: int) -> list[tuple[int, int]]:
    """Return first row and last row + 1 of each group; together they must be all rows."""
    spans = list(pairwise([0, *on_host(ends_G)]))
    check_counts([end - start for start, end in spans], rows)
    return spans


def check_counts(counts: list[int], rows: int) -> None:
    """Raise ValueError unless the groups are, one after the other, all rows."""
    for group, count in enumerate(counts):
        if count < 0:
            raise ValueError(
                f"group {group} has {count} rows, but no count may be below 0: the "
                "counts must be those of the rows that were received"
            )
    if sum(counts) != rows:
        raise ValueError(
            f"the groups have {sum(counts)} rows, but there are {rows}: the counts must be "
            "those of the rows that were received"
        )


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a @ b to `out`."""
    if in_transform():  # which know no op that is given its result
        out.copy_(a @ b)
    elif a.device.type == "cpu":
        product(a, b, out)
    else:
        torch.mm(a, b, out=out)


def _fits(x: Tensor) -> bool:
    """Return whether F.grouped_mm takes it: one dim dense, the others 16-byte aligned."""
    if x.dtype == torch.float64 or (x.device.type == "cpu" and is_widened(x.dtype)):
        return False
    strides = x.stride()
    dense = -1 if strides[-1] == 1 else -2
    if strides[dense] != 1:
        return False
    others = [s for d, s in enumerate(strides) if d != x.dim() + dense]
    least = x.shape[dense]
    return all(s >= least and s * x.element_size() % 16 == 0 for s in others)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grads_MN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows_MK, matrices_GKN, ends_G = ctx.saved_tensors
    grads_MN = grads_MN.contiguous()  # of `.sum()` it comes expanded
    wants_rows, wants_matrices, _ = ctx.needs_input_grad
    product, outer = _forward, _outer
    if is_dispatched(grads_MN):  # it is traced: there are no values to look at
        product, outer = _grouped_mm, _grouped_outer
    d_rows = product(grads_MN, matrices_GKN.mT, ends_G) if wants_rows else None
    if not wants_matrices:
        return d_rows, None, None
    if matrices_GKN.stride(-2) == 1:  # laid out as (G, N, K): so is the gradient, uncopied
        return d_rows, outer(grads_MN, rows_MK, ends_G).mT, None
    return d_rows, outer(rows_MK, grads_MN, ends_G), None


def _shape(rows_MK: Tensor, matrices_GKN: Tensor, ends_G: Tensor) -> Tensor:
    return rows_MK.new_empty(rows_MK.shape[0], matrices_GKN.shape[2])


def _outer_shape(rows_MK: Tensor, grads_MN: Tensor, ends_G: Tensor) -> Tensor:
    return rows_MK.new_empty(ends_G.shape[0], rows_MK.shape[1], grads_MN.shape[1])


_grouped_mm.register_autograd(_backward, setup_context=_save)  # pyright: ignore[reportUnknownMemberType]
_grouped_mm.register_fake(_shape)  # pyright: ignore[reportUnknownMemberType]
_grouped_outer.register_fake(_outer_shape)  # pyright: ignore[reportUnknownMemberType]
