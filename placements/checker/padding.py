"""`pad_rows`: rows of padding that are known as such, and the mask that tells them apart.

The type of a tensor says whether it holds such rows. They are never summed, counted or
looked at along with the other rows: mask them (`torch.where(valid, x, 0)`), or leave them
out (`x[valid]`, `x[:n]`).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from placements._torch import unseen
from placements.runtime import tags
from placements.runtime.describe import described
from placements.runtime.errors import padded_at, type_or_error, wrong_type
from placements.runtime.state import current
from placements.types.axis import AxisType, R, V
from placements.types.errors import ArgumentError
from placements.types.padding import Pads, Validity
from placements.types.tensor import TensorType, make


def pad_rows(x: Tensor, dim: int, *, to: int) -> tuple[Tensor, Tensor]:
    """Rows of zeros after those of `dim`, up to `to` -> (the padded tensor, its mask).

    The mask has one bool for every row of `dim`, True for those of `x`. Two tensors that
    are padded from equally many rows have the same mask. `padded[:n]` or `narrow` gives
    the rows of `x` back. Backward: the gradient of the rows of `x`.
    Communicates nothing. A dim that is cut is padded before it is cut.

        >>> x_TD, valid_T = pad_rows(x_TD, 0, to=8)
    """
    with unseen():
        dim, rows = dim % x.dim(), x.shape[dim]
        if to < rows:
            raise ValueError(f"pad_rows: to={to}, must be at least the {rows} rows of x")
        found = _padded_type(x, dim, rows) if current.mode is not None else None
        widths = [0, 0] * (x.dim() - 1 - dim) + [0, to - rows]
        padded = pad(x, widths) if to > rows else x.view_as(x)
        valid = torch.arange(to, device=x.device) < rows
        if found is not None:
            tags.put(padded, found)
            tags.put(valid, _mask_type(found, rows))
    return padded, valid


def _padded_type(x: Tensor, dim: int, rows: int) -> TensorType:
    known = type_or_error(x, "pad_rows")
    if known.order(dim):
        axis = known.order(dim)[0]
        raise wrong_type(
            "pad_rows", x, known, axis, "a dim that is not cut", repr(known[axis]),
            rule="padding a piece puts pad rows between the ranks' rows",
            advice="pad before the dim is cut",
        )  # fmt: skip
    if any(dim in pads.dims for pads in known.pads):
        raise padded_at("pad_rows", x, known)
    # Other rows of padding hold zero in the new rows.
    others = [p if not p.holds else Pads(p.validity, p.dims) for p in known.pads]
    new = Pads(Validity.of_first(rows), (dim,), 0)
    return known.written().with_pads((*others, new))


def _mask_type(padded: TensorType, rows: int) -> TensorType:
    types: dict[str, AxisType] = {axis: V if t == V else R for axis, t in padded.items()}
    return make(padded.mesh, types).with_pads((Pads(Validity.of_first(rows), (0,), 0),))


def declare_padding(x: Tensor, known: TensorType, valid: Tensor) -> TensorType:
    """Return the type of `x` whose first dims have rows of padding where `valid` is False.

    `valid` gets the type of a mask, if it has none yet. Raises ArgumentError if `valid`
    does not fit `x`.
    """
    mask = type_or_error(valid, "assert_type")
    dims = tuple(range(valid.dim()))
    if valid.dtype != torch.bool or not dims or valid.shape != x.shape[: len(dims)]:
        raise ArgumentError(
            f"valid= must be bools in the shape of the first dims of x, "
            f"{tuple(x.shape[: len(dims)])}; got {described(valid)}"
        )
    for dim in dims:
        if mask.cuts(dim) != known.cuts(dim):
            raise ArgumentError(
                f"valid= must be cut as x is in dim {dim}; got {described(valid)} for "
                f"{described(x, known)}"
            )
    named = [pads for pads in mask.pads if pads.dims == dims and pads.holds == 0]
    if not named:
        named = [Pads(Validity.new(), dims, 0)]
        tags.put(valid, mask.written().with_pads((*mask.pads, *named)))
    own = Pads(named[0].validity, dims)
    if any(p.validity == own.validity and p.dims == dims for p in known.pads):
        return known
    return known.with_pads((*known.pads, own))
