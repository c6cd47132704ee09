"""Flows of gathers and scatters: an index must count the rows that it addresses.

Along a dim that is not cut an index addresses whole rows, and everything stays local.
Along a dim that is cut it may address this rank's own rows only, and must say so
(`Index(extent, axis)`); then the op is the same one on every piece.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from placements.inference.combine import combine
from placements.inference.flows.broadcast import adds, terms_of
from placements.inference.op import SUM, Op
from placements.inference.rules import DIM_REASONS, LINEAR, Linearity
from placements.inference.terms import (
    SHAPES,
    Addressed,
    Contract,
    Label,
    Mixed,
    Operand,
    Refusal,
    Scattered,
    Term,
    index_term,
)
from placements.types.axis import AxisType, R, Shard, V
from placements.types.index import COMPUTED, Computed, Index
from placements.types.tensor import MADE, TensorType, make

ACROSS = "rows of this dim are spread over the ranks, and the op would see its own only"
POSITIONS = "the positions written to are spread over the ranks"


def check_aligned(input: Operand, *others: Any) -> None:
    """An index and a source stand beside the input dim by dim; torch says what is wrong."""
    for other in others:
        if isinstance(other, Operand) and (other.ndim or 1) != (input.ndim or 1):
            raise Refusal("the numbers of dims differ", operand=other, kind=SHAPES)


def addressed_axes(
    index: Operand, target: Operand, dim: int, *, writes: bool = False
) -> tuple[str, ...]:
    """The axes on which `index` addresses the rank's own rows of a cut dim.

    Raises Refusal if the index does not count the rows of that dim. What reads a dim that
    is not cut may take numbers of which nobody said what they count: row 3 is the same row
    on every rank. What writes may not, once arithmetic made the numbers.
    """
    domain, cuts = index.type.index, target.type.cuts(dim)
    if not target.type.mesh.axes or index.is_bool or index.type.is_number:
        return ()
    fits = Index.of_rows(cuts, target.shape[dim])
    if domain in (fits, Computed(fits)):
        axes = tuple(axis for axis, _ in cuts)
        for axis in axes:
            if index.type[axis].letter not in "VS":
                raise Refusal(
                    "an index of each rank's own rows differs by rank",
                    axis, index, "Varying or Shard",
                )  # fmt: skip
        return axes
    if cuts and _is_own_index(index, domain, target, dim):
        return tuple(axis for axis, _ in cuts)
    if not cuts and (domain is None or (isinstance(domain, Computed) and not writes)):
        return ()
    if not cuts and _counts_rows_here(domain, target, dim):
        return ()
    if isinstance(domain, Computed):
        axis, guilty, kind = None, index, "policy"
        reason = "arithmetic made this integer, so nothing says which rows it counts"
    elif cuts:
        axis, guilty, kind = cuts[-1][0], target, "unsound"
        reason = f"{ACROSS}, unless the index counts this rank's own rows"
    else:
        assert isinstance(domain, Index)
        axis, guilty, kind = None, index, "unsound"
        reason = "the index counts other rows than those of the dim it addresses"
        if domain.cuts:
            axis = domain.cuts[-1][0]
            reason = "the index counts one rank's own rows, and this dim holds all rows"
    raise Refusal(
        reason, axis, guilty, f"{fits!r} for dim {dim}", kind, index=(index, fits)
    )


def _is_own_index(
    index: Operand, domain: Index | Computed | None, target: Operand, dim: int
) -> bool:
    """Whether each rank's own index counts as many rows as its piece of a cut dim has.

    Rows of a piece that were chosen differently by rank are Varying, and where a mask of
    them holds is counted in these rows. What such an index takes is each rank's own.
    """
    domain = domain.counts if isinstance(domain, Computed) else domain
    if not isinstance(domain, Index) or domain.size != target.shape[dim]:
        return False
    return all(index.type.by_axis.get(axis) == V for axis, _ in target.type.cuts(dim))


def _counts_rows_here(domain: Index | Computed | None, target: Operand, dim: int) -> bool:
    """Whether an index of own rows counts those of a dim that is each rank's own."""
    domain = domain.counts if isinstance(domain, Computed) else domain
    if not isinstance(domain, Index) or not domain.cuts:
        return False
    if any(target.type.by_axis.get(axis, R) != V for axis, _ in domain.cuts):
        return False
    axis, extent = domain.cuts[-1]
    return extent.local_size(target.type.mesh.place[axis]) == target.shape[dim]


def owned(axes: tuple[str, ...], otherwise: Label) -> Label:
    return Addressed(axes, otherwise) if axes else otherwise


def check_rows(
    axes: tuple[str, ...],
    index: Operand,
    source: Operand,
    index_dim: int,
    source_dim: int,
) -> None:
    """Rows that are written to own rows must be cut as the index is: one row each."""
    cut = [axis for axis in axes if axis in index.cut_axes(index_dim)]
    for axis in cut:
        shard = index.type[axis]
        assert isinstance(shard, Shard)
        wanted = Shard(source_dim, shard.extent)
        if source.type[axis] != wanted and source.type[axis].letter != "V":
            raise Refusal(
                "every row that is written goes with one element of the index, so both "
                "must be cut alike",
                axis, source, repr(wanted),
            )  # fmt: skip
    orders = [
        [axis for axis in order if axis in cut]
        for order in (index.cut_axes(index_dim), source.cut_axes(source_dim))
    ]
    if orders[0] != orders[1] and len(orders[1]) == len(cut):
        raise Refusal(
            f"{DIM_REASONS['other order']}: {orders}", cut[0], source, str(orders[0])
        )


def gather(
    op: Op, input: Operand, dim: int, index: Operand, sparse_grad: bool = False
) -> TensorType:
    """Input and index aligned but for `dim`."""
    check_aligned(input, index)
    return _rows_at(op, input, dim, index, tuple(range(index.ndim)))


def _rows_at(
    op: Op, input: Operand, dim: int, index: Operand, labels: tuple[Label, ...]
) -> TensorType:
    """Rows of `dim` at an index whose dims have these labels."""
    along = dim % input.ndim
    own = owned(addressed_axes(index, input, along), Mixed(ACROSS))
    kept = tuple(own if d == along else d for d in range(input.ndim))
    terms = [Term(input, kept), index_term(index, labels)]
    return combine(op.linearity, terms, index=input.type.index)


def take_along_dim(
    op: Op, input: Operand, indices: Operand, dim: int | None = None
) -> TensorType:
    """As gather; dims of one row are broadcast."""
    if dim is None:
        raise Refusal("take_along_dim without dim= flattens; name the dim", operand=input)
    check_aligned(input, indices)
    along = dim % input.ndim

    def label(x: Operand, d: int) -> Label:
        return None if d != along and x.is_one_row(d) else d

    own = owned(addressed_axes(indices, input, along), Mixed(ACROSS))
    labels = [own if d == along else label(input, d) for d in range(input.ndim)]
    index_labels = tuple(label(indices, d) for d in range(indices.ndim))
    return combine(
        op.linearity,
        [Term(input, tuple(labels)), index_term(indices, index_labels)],
        index=input.type.index,
    )


def index_select(op: Op, input: Operand, dim: int, index: Operand) -> TensorType:
    return _rows_at(op, input, dim, index, (dim % input.ndim,))


def embedding(
    op: Op,
    input: Operand,
    weight: Operand,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
) -> TensorType:
    """Rows of `weight` for every id."""
    axes = addressed_axes(input, weight, 0)
    if axes and padding_idx is not None:
        raise Refusal(
            "padding_idx would name a row of each rank's piece", axes[0], weight,
            "padding_idx=None", kind="unsound",
        )  # fmt: skip
    if max_norm is not None or scale_grad_by_freq:
        raise Refusal(
            "max_norm and scale_grad_by_freq depend on the ids of this rank alone",
            operand=input, expected="max_norm=None, scale_grad_by_freq=False",
        )  # fmt: skip
    last = input.ndim
    return combine(
        op.linearity,
        [
            Term(weight, (owned(axes, Mixed(ACROSS)), last)),
            index_term(input, tuple(range(input.ndim))),
        ],
    )


def scatter(
    op: Op,
    input: Operand,
    dim: int,
    index: Operand,
    src: Any = None,
    value: Any = None,
    reduce: str | None = None,
    include_self: bool = True,
) -> TensorType:
    """scatter, scatter_add, scatter_reduce: write `src` at `index` along `dim`."""
    if reduce is not None and op.linearity is LINEAR:
        raise Refusal(
            "scatter with reduce= is not known; scatter_add and scatter_reduce are",
            operand=input, expected="scatter_add or scatter_reduce", kind="policy",
        )  # fmt: skip
    src = value if src is None else src
    check_aligned(input, index, *([src] if isinstance(src, Operand) and src.ndim else []))
    along = dim % input.ndim
    axes = addressed_axes(index, input, along, writes=True)
    # To sum at the index is linear, and spreads over ranks, whatever the op is called.
    is_sum = reduce == "sum"
    spreads = is_sum and include_self
    own = owned(axes, Contract("written") if spreads else op.along_label("written"))
    source = tuple(own if d == along else d for d in range(index.ndim))
    terms = [_written_term(input, along, axes), index_term(index, source)]
    if isinstance(src, Operand):
        src = _at_each_index(src, index, index.ndim - 1)
        check_rows(axes, index, src, along, along)
        terms.append(Term(src, source))
    linearity = LINEAR if is_sum else op.linearity
    return after_write(
        linearity, input, terms, src, adds_up=op.along == SUM or bool(reduce)
    )


def index_write(
    op: Op,
    input: Operand,
    dim: int,
    index: Operand,
    source: Any = None,
    value: Any = None,
    alpha: Any = 1,
) -> TensorType:
    """index_add, index_copy, index_fill: whole rows at `index` along `dim`."""
    source = value if source is None else source
    along = dim % input.ndim
    axes = addressed_axes(index, input, along, writes=True)
    own = owned(axes, op.along_label("written"))
    terms = [_written_term(input, along, axes), index_term(index, (own,))]
    if isinstance(source, Operand):
        rows = tuple(own if d == along else d for d in range(source.ndim))
        source = _at_each_index(source, index, 0 if source.ndim else -1, along)
        if source.ndim:
            check_rows(axes, index, source, 0, along)
        terms.append(Term(source, rows))
    return after_write(op.linearity, input, terms, source, adds_up=op.along == SUM)


def _written_term(input: Operand, along: int, axes: tuple[str, ...]) -> Term:
    """Return the target of a write along a dim whose own rows on `axes` are addressed."""
    labels = (Mixed(ACROSS) if d == along and not axes else d for d in range(input.ndim))
    return Term(input, tuple(labels))


def _at_each_index(source: Operand, index: Operand, last: int, shift: int = 0) -> Operand:
    """Return the type of one number that is written at every index: cut as the index is.

    Dims up to `last` of the index are those of the source from `shift` on. Plain sizes
    are the same on all ranks, so they are not those of pieces that differ in size.
    """
    rows = source.shape[shift : shift + last + 1]
    if not source.type.is_number or rows != index.shape[: last + 1]:
        return source
    types: dict[str, AxisType] = {}
    for axis, t in index.type.items():
        types[axis] = V if t == V else R
        if isinstance(t, Shard) and t.dim <= last:
            assert t.extent is not None
            if not t.extent.equal_sizes and not isinstance(source.type[axis], Shard):
                return source
            types[axis] = Shard(t.dim + shift, t.extent)
    return replace(source, type=make(index.type.mesh, types, fresh=MADE))


def after_write(
    linearity: Linearity,
    input: Operand,
    terms: Sequence[Term],
    value: object,
    *,
    adds_up: bool = False,
) -> TensorType:
    """The target after a write; `adds_up`: what it held is a term of the result."""
    index = index_of_written(input, None if adds_up else value)
    return combine(linearity, terms, index=index, adds_number=adds(value))


def index_of_written(input: Operand, value: object) -> Index | Computed | None:
    """What a tensor indexes after a write; what is written need not be an own row."""
    domain = input.type.index
    other = value.type.index if isinstance(value, Operand) else None
    is_own = isinstance(domain, Index) and bool(domain.cuts)
    return COMPUTED if is_own and other != domain else domain


def masked_select(op: Op, input: Operand, mask: Operand) -> TensorType:
    every = terms_of([input], [mask])
    combine(op.linearity, every)  # both are cut alike, or it is refused
    terms = [
        Term(t.operand, tuple(Scattered() for _ in t.labels), t.is_control) for t in every
    ]
    return combine(op.linearity, terms, index=input.type.index)


def nonzero(op: Op, input: Operand, as_tuple: bool = False) -> Any:
    """Where the non-zero elements are: each rank finds its own, counted in each dim."""
    labels = tuple(Scattered() for _ in range(input.ndim))
    found = combine(op.linearity, [Term(input, labels)], index=COMPUTED)
    rows = [Index.of_rows(input.type.cuts(d), n) for d, n in enumerate(input.shape)]
    if as_tuple:
        return tuple(found.with_index(each) for each in rows or [Index(1)])
    return found.with_index(rows[0]) if len(rows) == 1 else found
