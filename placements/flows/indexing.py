"""Flows of gathers and scatters: an index must count the rows that it addresses.

Along a dim that is not cut an index addresses whole rows, and everything stays local.
Along a dim that is cut it may address this rank's own rows only, and must say so
(`Index(extent, axis)`); then the op is the same one on every piece.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from placements import pad_rules
from placements.flows.elementwise import broadcast, is_number, terms_of
from placements.flows.views import PIECEWISE
from placements.index import COMPUTED, Computed, Index
from placements.infer import (
    Addressed,
    Contract,
    Label,
    Mixed,
    Operand,
    Refusal,
    Scattered,
    Term,
    combine,
)
from placements.rules import DIM_REASONS, LINEAR, Linearity
from placements.tensor_type import MADE, TensorType, make
from placements.types import AxisType, R, Shard, V

if TYPE_CHECKING:
    from placements.ops import Op

ACROSS = "rows of this dim are spread over the ranks, and the op would see its own only"
POSITIONS = "the positions written to are spread over the ranks"


def addressed_axes(index: Operand, target: Operand, dim: int) -> tuple[str, ...]:
    """The axes on which `index` addresses the rank's own rows of a cut dim.

    Raises Refusal if the index does not count the rows of that dim.
    """
    domain, cuts = index.type.index, target.type.cuts(dim)
    if not target.type.mesh.axes or index.is_bool or index.type.is_number:
        return ()
    fits = Index.of_cuts(cuts) if cuts else Index(target.shape[dim])
    if domain == fits:
        axes = tuple(axis for axis, _ in cuts)
        for axis in axes:
            if index.type[axis].letter not in "VS":
                raise Refusal(
                    "an index of each rank's own rows differs by rank",
                    axis, index, "Varying or Shard",
                )  # fmt: skip
        return axes
    if domain is None and not cuts:
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


def _own(axes: tuple[str, ...], otherwise: Label) -> Label:
    return Addressed(axes, otherwise) if axes else otherwise


def _check_rows(
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


def gather(op: "Op", input: Operand, dim: int, index: Operand, **kwargs: Any) -> TensorType:
    """Input and index aligned but for `dim`."""
    along = dim % input.ndim
    axes = addressed_axes(index, input, along)
    labels = [_own(axes, Mixed(ACROSS)) if d == along else d for d in range(input.ndim)]
    return combine(
        op.linearity,
        [
            Term(input, tuple(labels)),
            Term(index, tuple(range(index.ndim)), is_control=True),
        ],
        index=input.type.index,
    )


def take_along_dim(
    op: "Op", input: Operand, indices: Operand, dim: int | None = None
) -> TensorType:
    """As gather; dims of one row are broadcast."""
    if dim is None:
        raise Refusal("take_along_dim without dim= flattens; name the dim", operand=input)
    along = dim % input.ndim

    def label(x: Operand, d: int) -> Label:
        return None if d != along and x.is_one_row(d) else d

    own = _own(addressed_axes(indices, input, along), Mixed(ACROSS))
    labels = [own if d == along else label(input, d) for d in range(input.ndim)]
    index_labels = tuple(label(indices, d) for d in range(indices.ndim))
    return combine(
        op.linearity,
        [Term(input, tuple(labels)), Term(indices, index_labels, is_control=True)],
        index=input.type.index,
    )


def index_select(op: "Op", input: Operand, dim: int, index: Operand) -> TensorType:
    along = dim % input.ndim
    axes = addressed_axes(index, input, along)
    labels = [_own(axes, Mixed(ACROSS)) if d == along else d for d in range(input.ndim)]
    return combine(
        op.linearity,
        [Term(input, tuple(labels)), Term(index, (along,), is_control=True)],
        index=input.type.index,
    )


def embedding(
    op: "Op",
    input: Operand,
    weight: Operand,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
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
            Term(weight, (_own(axes, Mixed(ACROSS)), last)),
            Term(input, tuple(range(input.ndim)), is_control=True),
        ],
    )


def scatter(
    op: "Op",
    input: Operand,
    dim: int,
    index: Operand,
    src: Any = None,
    reduce: str | None = None,
    **kwargs: Any,
) -> TensorType:
    """scatter, scatter_add, scatter_reduce: write `src` at `index` along `dim`."""
    if reduce is not None and op.linearity is LINEAR:
        raise Refusal(
            "scatter with reduce= is not known; scatter_add and scatter_reduce are",
            operand=input, expected="scatter_add or scatter_reduce", kind="policy",
        )  # fmt: skip
    src = kwargs.get("value", src)
    along = dim % input.ndim
    axes = addressed_axes(index, input, along)
    # To sum at the index is linear, and spreads over ranks, whatever the op is called.
    is_sum = reduce == "sum"
    adds = is_sum and kwargs.get("include_self", True)
    own = _own(axes, Contract("written") if adds else op.along_label("written"))
    target = [_own(axes, Mixed(ACROSS)) if d == along else d for d in range(input.ndim)]
    target[along] = along if axes else target[along]
    source = tuple(own if d == along else d for d in range(index.ndim))
    terms = [Term(input, tuple(target)), Term(index, source, is_control=True)]
    if isinstance(src, Operand):
        src = _at_each_index(src, index, index.ndim - 1)
        _check_rows(axes, index, src, along, along)
        terms.append(Term(src, source))
    return _written(LINEAR if is_sum else op.linearity, input, terms, src)


def index_write(
    op: "Op", input: Operand, dim: int, index: Operand, source: Any, **kwargs: Any
) -> TensorType:
    """index_add, index_copy, index_fill: whole rows at `index` along `dim`."""
    along = dim % input.ndim
    axes = addressed_axes(index, input, along)
    own = _own(axes, op.along_label("written"))
    target: list[Label] = [
        Mixed(ACROSS) if d == along and not axes else d for d in range(input.ndim)
    ]
    terms = [Term(input, tuple(target)), Term(index, (own,), is_control=True)]
    if isinstance(source, Operand):
        rows = tuple(own if d == along else d for d in range(source.ndim))
        source = _at_each_index(source, index, 0 if source.ndim else -1, along)
        if source.ndim:
            _check_rows(axes, index, source, 0, along)
        terms.append(Term(source, rows))
    return _written(op.linearity, input, terms, source)


def _at_each_index(source: Operand, index: Operand, last: int, shift: int = 0) -> Operand:
    """One number, given a shape, that is written at an index: a piece as the index is.

    Dims up to `last` of the index are those of the source from `shift` on.
    """
    if not source.type.is_number:
        return source
    types: dict[str, AxisType] = {}
    for axis, t in index.type.items():
        types[axis] = V if t == V else R
        if isinstance(t, Shard) and t.dim <= last:
            types[axis] = Shard(t.dim + shift, t.extent)
    return replace(source, type=make(index.type.mesh, types, fresh=MADE))


def _written(
    linearity: Linearity, input: Operand, terms: Sequence[Term], value: object
) -> TensorType:
    return combine(
        linearity,
        terms,
        index=input.type.index,
        adds_number=is_number(value) and value != 0,
    )


def getitem(op: "Op", input: Operand, key: Any) -> TensorType:
    """x[...]: integers, slices, None, ellipsis, integer tensors and bool masks."""
    plan = _Plan(input, key)
    for entry, dim, _ in plan.entries:
        if _is_start(entry):
            input = pad_rules.first_rows(input, dim, entry.stop)
    terms = [Term(input, plan.read_labels())]
    terms += plan.index_terms()
    return combine(op.linearity, terms, index=input.type.index)


def setitem(op: "Op", input: Operand, key: Any, value: Any) -> TensorType:
    """x[...] = value: the target keeps its type."""
    plan = _Plan(input, key)
    terms = [Term(input, plan.write_labels())]
    terms += plan.written_index_terms()
    if isinstance(value, Operand):
        terms.append(Term(value, plan.value_labels(value)))
    return _written(op.linearity, input, terms, value)


def index_put(
    op: "Op", input: Operand, indices: Any, values: Any, accumulate: bool = False
) -> TensorType:
    return setitem(op, input, tuple(indices), values)


def masked_select(op: "Op", input: Operand, mask: Operand) -> TensorType:
    every = terms_of([input], [mask])
    terms = [
        Term(t.operand, tuple(Scattered() for _ in t.labels), t.is_control) for t in every
    ]
    return combine(op.linearity, terms, index=input.type.index)


def nonzero(op: "Op", input: Operand, *args: Any, **kwargs: Any) -> TensorType:
    """Where the elements are: as many rows as each rank finds."""
    labels = tuple(Scattered() for _ in range(input.ndim))
    return combine(op.linearity, [Term(input, labels)], index=COMPUTED)


class _Plan:
    """What an indexing key does to each dim of the tensor it indexes."""

    def __init__(self, input: Operand, key: Any) -> None:
        self.input = input
        keys: list[Any] = list(cast(Any, key)) if isinstance(key, tuple) else [key]
        keys = self._with_ellipsis(keys)
        # (key, first dim it consumes, number of dims it consumes)
        self.entries: list[tuple[Any, int, int]] = []
        dim = 0
        for entry in keys:
            width = 0 if entry is None else _width(entry)
            self.entries.append((entry, dim, width))
            dim += width
        for rest in range(dim, input.ndim):
            self.entries.append((slice(None), rest, 1))
        self.tensors = [e for e in self.entries if isinstance(e[0], Operand)]
        for entry, _, _ in self.entries:
            if isinstance(entry, list):
                raise Refusal(
                    "indexing with a list: use a tensor that says what it indexes",
                    operand=input,
                )
        self._place()

    def _with_ellipsis(self, keys: list[Any]) -> list[Any]:
        at = next((i for i, k in enumerate(keys) if k is Ellipsis), None)
        if at is None:
            return keys
        used = sum(0 if k is None or k is Ellipsis else _width(k) for k in keys)
        return [
            *keys[:at], *[slice(None)] * (self.input.ndim - used), *keys[at + 1 :]
        ]  # fmt: skip

    def _place(self) -> None:
        """Number the dims of the result."""
        indices = [e[0] for e in self.tensors if not e[0].is_bool]
        self.index_ndim = max((i.ndim for i in indices), default=0)
        if any(e[0].is_bool for e in self.tensors):
            self.index_ndim = max(self.index_ndim, 1)
        # torch takes the rows of plain integers first, so these do not come between.
        kept = [entry for entry in self.entries if not _is_int(entry[0])]
        advanced = [k for k, (entry, _, _) in enumerate(kept) if isinstance(entry, Operand)]
        together = bool(advanced) and advanced == list(range(advanced[0], advanced[-1] + 1))
        self.index_at = 0
        place = 0 if together or not advanced else self.index_ndim
        self.result_dim: dict[int, int] = {}
        for k, (entry, dim, _) in enumerate(kept):
            if advanced and together and k == advanced[0]:
                self.index_at = place
                place += self.index_ndim
            if entry is None:
                place += 1
            elif isinstance(entry, slice):
                self.result_dim[dim] = place
                place += 1
        self.result_ndim = place

    def _axes(self, index: Operand, dim: int) -> tuple[str, ...]:
        return addressed_axes(index, self.input, dim)

    def read_labels(self) -> tuple[Label, ...]:
        labels: list[Label] = [None] * self.input.ndim
        for entry, dim, width in self.entries:
            if isinstance(entry, Operand) and entry.is_bool:
                labels[dim : dim + width] = [Scattered()] * width
            elif isinstance(entry, Operand):
                labels[dim] = _own(self._axes(entry, dim), Mixed(ACROSS))
            elif _is_int(entry):
                labels[dim] = Mixed(PIECEWISE)
            elif isinstance(entry, slice):
                part = _is_part(entry)
                labels[dim] = Mixed(PIECEWISE) if part else self.result_dim[dim]
        return tuple(labels)

    def index_terms(self) -> list[Term]:
        terms: list[Term] = []
        indices = [e[0] for e in self.tensors if not e[0].is_bool]
        for index, labels in zip(
            indices, broadcast(indices) if indices else [], strict=True
        ):
            shift = self.index_at + self.index_ndim - max(i.ndim for i in indices)
            moved = tuple(
                label + shift if isinstance(label, int) else label for label in labels
            )
            terms.append(Term(index, moved, is_control=True))
        for entry, _, _ in self.tensors:
            if entry.is_bool:
                spread = tuple(Scattered() for _ in range(entry.ndim))
                terms.append(Term(entry, spread, is_control=True))
        return terms

    def write_labels(self) -> tuple[Label, ...]:
        labels: list[Label] = list(range(self.input.ndim))
        for entry, dim, _ in self.entries:
            if _is_int(entry) or _is_part(entry):
                labels[dim] = Mixed(PIECEWISE)
            elif isinstance(entry, Operand) and not entry.is_bool:
                if not self._axes(entry, dim):
                    labels[dim] = Mixed(ACROSS)
        return tuple(labels)

    def written_index_terms(self) -> list[Term]:
        terms: list[Term] = []
        for entry, dim, width in self.tensors:
            if entry.is_bool:
                labels: tuple[Label, ...] = tuple(range(dim, dim + width))
            else:
                own = _own(self._axes(entry, dim), Mixed(POSITIONS))
                labels = tuple(own for _ in range(entry.ndim))
            terms.append(Term(entry, labels, is_control=True))
        return terms

    def value_labels(self, value: Operand) -> tuple[Label, ...]:
        """Dims of the value, aligned with the dims of `x[key]` from the right."""
        target: list[Label] = [None] * self.result_ndim
        for entry, dim, width in self.entries:
            if width and dim in self.result_dim:
                part = _is_part(entry)
                target[self.result_dim[dim]] = Mixed(POSITIONS) if part else dim
        for entry, dim, _ in self.tensors:
            for k in range(self.index_ndim):
                if entry.is_bool:
                    target[self.index_at + k] = Mixed(POSITIONS)
                else:
                    own = _own(self._axes(entry, dim), Mixed(POSITIONS))
                    target[self.index_at + k] = own
        shift = self.result_ndim - value.ndim
        for entry, dim, _ in self.tensors:
            for k in range(0 if entry.is_bool else entry.ndim):
                at = self.index_at + self.index_ndim - entry.ndim + k - shift
                if at >= 0 and (value.shape[at] != 1 or value.cut_axes(at)):
                    _check_rows(self._axes(entry, dim), entry, value, k, at)
        return tuple(
            None if value.is_one_row(d) else target[d + shift] for d in range(value.ndim)
        )


def _width(entry: Any) -> int:
    return entry.ndim if isinstance(entry, Operand) and entry.is_bool else 1


def _is_int(entry: object) -> bool:
    return isinstance(entry, int) and not isinstance(entry, bool)


def _is_start(entry: Any) -> bool:
    """Whether it is a slice of the first rows."""
    if not isinstance(entry, slice):
        return False
    bounds = cast(Any, entry)
    return bounds.start in (None, 0) and bounds.step in (None, 1)


def _is_part(entry: Any) -> bool:
    """Whether a slice may leave rows out; one that names its end is taken at its word.

    An end that is as long as this rank's piece says nothing of the other ranks' pieces.
    """
    if not isinstance(entry, slice):
        return False
    bounds = cast(Any, entry)
    return not (_is_start(entry) and bounds.stop is None)
