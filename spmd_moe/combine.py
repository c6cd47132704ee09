"""Weigh a token's rows by its gates and sum them: rows by slot -> tokens.

The result is this rank's own tokens and stays here. A consumer that needs the full length
as a Partial asks for `combine_full_length`, which writes them at their global rows: which
those are is read from the extent, never computed from rank and length.
"""

from typing import Annotated

import torch
from torch import Tensor

from placements import (
    Extent,
    On,
    Partial,
    assert_type,
    row_numbers,
    to_global,
    type_of,
    typed,
)
from spmd_moe.dims import ND, TD, TK, IndexN
from spmd_moe.layouts import Layout
from spmd_moe.paths.add_rows import add_rows
from spmd_moe.paths.own import own_rows, pieces_like
from spmd_moe.paths.recorder import ran
from spmd_moe.precision import wide_dtype, without_autocast

# So many numbers, 1 MB in float32, are in the cache of a processor.
PIECE = 2**18


@typed
def combine(
    rows_ND: Annotated[ND, On("{layout.collected}")],
    gates_TK: Annotated[TK, On("{layout.routing}")],
    layout: Layout,
    *,
    weigh: bool,
    narrow: bool = False,
) -> Annotated[TD, On("{layout.combined}")]:
    """rows Varying -> tokens Shard(0); rows Partial, gates Replicate -> Partial.

    The sum runs in at least float32, also under autocast, and the result has the rows'
    dtype; with `narrow` it runs in that dtype. With `weigh` false the gates were applied
    before the experts and only the sum is left.
    Backward: d_rows = gates * d_y; d_gates = <d_y, rows>, Partial where the rows are.
    Communicates nothing.
    """
    tokens, choices = gates_TK.shape
    wide = rows_ND.dtype if narrow else wide_dtype(rows_ND, gates_TK)
    if narrow and wide != gates_TK.dtype:
        ran("gates_in_narrow_dtype")
    gates = own_rows(gates_TK).unsqueeze(1).to(wide)
    rows_TKD = torch.unflatten(rows_ND, 0, (tokens, choices)).to(wide)
    with without_autocast(gates):
        y_TD = (gates @ rows_TKD).squeeze(1) if weigh else rows_TKD.sum(1)
    return pieces_like(y_TD.to(rows_ND.dtype), gates_TK)


def combine_in_pieces(
    rows_MD: Tensor,
    inverse_N: Tensor,
    gates_TK: Tensor,
    layout: Layout,
    *,
    weigh: bool,
    narrow: bool,
) -> Tensor:
    """rows by expert -> tokens: `combine` of the rows by slot, bit for bit.

    The rows are put in order, widened and summed for a few tokens at a time. So they stay
    in the cache, where all rows at once would be memory that is fresh from the system.
    For unchecked code without gradients. Communicates nothing.
    """
    tokens, choices = gates_TK.shape
    y_TD = rows_MD.new_empty(tokens, rows_MD.shape[1])
    step = max(1, PIECE // max(1, choices * rows_MD.shape[1]))
    for start in range(0, tokens, step):
        slots = inverse_N[start * choices : (start + step) * choices]
        rows, gates = rows_MD.index_select(0, slots), gates_TK[start : start + step]
        found = combine(rows, gates, layout, weigh=weigh, narrow=narrow)
        y_TD[start : start + step] = found
    return y_TD


@typed
def combine_into(
    out_TD: Annotated[TD, On("{layout.combined}")],
    rows_ND: Annotated[ND, On("{layout.collected}")],
    gates_TK: Annotated[TK, On("{layout.routing}")],
    order_N: IndexN,
    layout: Layout,
    *,
    weigh: bool,
    keep: Tensor,
) -> Annotated[TD, On("{layout.combined}")]:
    """rows by expert, added to tokens that have a value already; see `add_rows`.

    `order_N` are the slots of the rows. Each row is weighed in at least float32 and added
    in the dtype of `out_TD`. Communicates nothing.
    """
    if weigh:
        gates_N = own_rows(gates_TK).flatten()[order_N]
        wide = wide_dtype(rows_ND, gates_N)
        rows_ND = rows_ND.to(wide) * gates_N.unsqueeze(1)
    choices = gates_TK.shape[1]
    tokens_N = own_rows(row_numbers(out_TD, 0)).repeat_interleave(choices)[order_N]
    return add_rows(out_TD, tokens_N, rows_ND.to(out_TD.dtype), keep=keep)


@typed
def combine_full_length(
    rows_ND: ND, gates_TK: TK, layout: Layout, *, weigh: bool, axis: str, extent: Extent
) -> Tensor:
    """rows Varying -> Partial on `axis`: all tokens, zero but for this rank's own.

    `extent` says which of the tokens along `axis` are here.
    Backward: the gradient, Replicate, is read at the same rows. Communicates nothing.
    """
    y_TD = combine(rows_ND, gates_TK, layout, weigh=weigh)
    placed = {**(type_of(y_TD) or {}), axis: Partial()}
    full = assert_type(y_TD.new_zeros(extent.total, y_TD.shape[1]), placed)
    return full.index_add(0, to_global(row_numbers(y_TD, 0), axis, extent), y_TD)
