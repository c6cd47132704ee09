"""Rows: tensors side by side, in grids, or written into others."""

from functools import partial

from placements.inference.flows import arrangements, views
from placements.inference.op import Row
from placements.inference.rules import LINEAR, MULTILINEAR

_JOINED = "joined along a dim that is not cut"
_SHAPES = "each in the shape of all"

ROWS: tuple[Row, ...] = (
    Row("views", "tril triu", LINEAR, arrangements.triangle, "value input; choice diagonal",
        "zeros where the place in the matrix says so"),
    Row("views", "hstack", LINEAR, arrangements.hstack, "value tensors", _JOINED),
    Row("views", "vstack row_stack", LINEAR, arrangements.vstack, "value tensors", _JOINED),
    Row("views", "dstack", LINEAR, arrangements.dstack, "value tensors", _JOINED),
    Row("views", "column_stack", LINEAR, arrangements.column_stack, "value tensors",
        _JOINED),
    *(Row("views", f"atleast_{n}d", LINEAR, partial(arrangements.at_least, dims=n),
          "value tensors/tensor", "dims of one row are added") for n in (1, 2, 3)),
    Row("products", "kron", MULTILINEAR, arrangements.kron, "value input other",
        "linear in each factor"),
    Row("views", "broadcast_tensors", LINEAR, arrangements.broadcast_together,
        "value tensors", _SHAPES),
    Row("views", "meshgrid", LINEAR, arrangements.grid, "value tensors; flag indexing",
        _SHAPES),
    *(Row("views", name, LINEAR, partial(arrangements.parts_along, dim=dim),
          "value input; choice sections indices", "parts of a dim that is not cut")
      for name, dim in (("hsplit", 1), ("vsplit", 0), ("dsplit", 2))),
    Row("views", "narrow_copy", LINEAR, views.narrow,
        "value input; dim dim; choice start length", "rows of a dim that is not cut"),
    Row("views", "unsafe_split unsafe_chunk unsafe_split_with_sizes", LINEAR, views.pieces,
        "value input; choice split_size split_sizes chunks; dim dim",
        "parts of a dim that is not cut"),
    Row("gathers", "take", LINEAR, arrangements.taken, "value input; control index",
        "elements of the flattened tensor; the index must count them"),
    Row("scatters", "fill_diagonal", LINEAR, arrangements.filled_diagonal,
        "value input fill_value; flag wrap",
        "linear if the fill is zero; which elements it is depends on all dims"),
    Row("scatters", "masked_scatter", LINEAR, arrangements.masked_scatter,
        "value input source; control mask",
        "linear in target and source; the mask must be common to the ranks of a sum"),
    Row("scatters", "select_scatter slice_scatter", LINEAR, arrangements.scattered_rows,
        "value input src; dim dim; choice index start end; flag step",
        "linear in target and source; rows of a dim that is not cut"),
)  # fmt: skip
