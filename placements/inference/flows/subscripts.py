"""Flows of subscripts: `x[...]` read and written; integers, slices, tensors, masks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from placements.inference import padding
from placements.inference.combine import combine
from placements.inference.flows.broadcast import broadcast
from placements.inference.flows.elementwise import linearity_to
from placements.inference.flows.indexing import (
    ACROSS,
    POSITIONS,
    addressed_axes,
    after_write,
    check_rows,
    owned,
)
from placements.inference.numbers import RankInt
from placements.inference.op import Op
from placements.inference.rules import NONLINEAR
from placements.inference.sizes import as_zeros
from placements.inference.terms import (
    NO_ARGUMENT,
    PIECEWISE,
    Label,
    Mixed,
    Operand,
    Refusal,
    Scattered,
    Term,
    index_term,
)
from placements.types.tensor import EMPTY, MADE, TensorType, from_factory


def getitem(op: Op, input: Operand, idx: Any) -> TensorType:
    """x[...]: integers, slices, None, ellipsis, integer tensors and bool masks."""
    plan = _Plan(input, idx)
    for entry, dim, _ in plan.entries:
        if _is_start(entry):
            input = padding.first_rows(input, dim, entry.stop)
    terms = [Term(input, plan.read_labels())]
    terms += plan.index_terms() + plan.end_terms()
    found = combine(op.linearity, terms, index=input.type.index)
    is_alike = input.type.is_number or input.type.fresh == EMPTY
    # A part of zeros is zeros, and a part of memory that nobody wrote is nobody's.
    is_part = is_alike and not (plan.tensors or plan.ends)
    return found.with_fresh(input.type.fresh) if is_part else found


def setitem(op: Op, input: Operand, k: Any, v: Any, *, adds_up: bool = False) -> TensorType:
    """x[...] = value: the target keeps its type."""
    input = as_zeros(input)
    plan, value = _Plan(input, k, writes=True), v
    terms = [Term(input, plan.write_labels())]
    terms += plan.written_index_terms() + plan.end_terms()
    if isinstance(value, Operand):
        terms.append(Term(value, plan.value_labels(value)))
    filled = value if isinstance(value, Operand) else input
    linearity = linearity_to(op, filled, input.dtype)
    return after_write(linearity, input, terms, value, adds_up=adds_up)


def index_put(
    op: Op, input: Operand, indices: Any, values: Any, accumulate: bool = False
) -> TensorType:
    return setitem(op, input, tuple(indices), values, adds_up=bool(accumulate))


class _Plan:
    """What an indexing key does to each dim of the tensor it indexes."""

    def __init__(self, input: Operand, key: Any, *, writes: bool = False) -> None:
        self.input, self.writes = input, writes
        keys: list[Any] = list(cast(Any, key)) if isinstance(key, tuple) else [key]
        keys = self._with_ellipsis([self._as_index(entry) for entry in keys])
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
            _check_class(entry, input)
        # Tensors that say where slices end: which rows come out depends on them.
        self.ends = [
            end
            for entry, _, _ in self.entries
            if isinstance(entry, slice)
            for end in _ends(entry)
            if isinstance(end, Operand)
        ]
        self._place()

    def _as_index(self, entry: Any) -> Any:
        """A list of whole numbers as the tensor that torch makes of it; uint8 as a mask."""
        if isinstance(entry, Operand) and entry.dtype == "uint8":
            return replace(entry, dtype="bool")
        if entry.__class__ not in (list, tuple, range):
            return entry
        numbers = cast(Sequence[Any], entry)
        if not all(map(_is_int, numbers)):
            return entry
        made = from_factory(self.input.type.mesh, MADE)
        return Operand(made, (len(numbers),), "int64", NO_ARGUMENT)

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
        # torch takes the rows of single integers first, so these do not come between.
        kept = [entry for entry in self.entries if not _is_one_row(entry[0])]
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
        return addressed_axes(index, self.input, dim, writes=self.writes)

    def read_labels(self) -> tuple[Label, ...]:
        labels: list[Label] = [None] * self.input.ndim
        for entry, dim, width in self.entries:
            if isinstance(entry, Operand) and entry.is_bool:
                labels[dim : dim + width] = [Scattered()] * width
            elif isinstance(entry, Operand):
                labels[dim] = owned(self._axes(entry, dim), Mixed(ACROSS))
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
            terms.append(index_term(index, moved))
        for entry, _, _ in self.tensors:
            if entry.is_bool:
                spread = tuple(Scattered() for _ in range(entry.ndim))
                terms.append(Term(entry, spread, is_control=True))
        return terms

    def end_terms(self) -> list[Term]:
        return [Term(end, (None,) * end.ndim, is_control=True) for end in self.ends]

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
        indices = [e[0] for e in self.tensors if not e[0].is_bool]
        if len(indices) > 1:  # the k-th of each go together, so they must be cut alike
            together = zip(indices, broadcast(indices), strict=True)
            combine(NONLINEAR, [Term(i, labels, is_index=True) for i, labels in together])
        # With several, the k-th row that a mask selects goes with the k-th of the others.
        is_alone = sum(not _is_one_row(entry) for entry, _, _ in self.tensors) == 1
        for entry, dim, width in self.tensors:
            if entry.is_bool:
                labels: tuple[Label, ...] = tuple(range(dim, dim + width))
                labels = labels if is_alone else (Mixed(POSITIONS),) * width
                terms.append(Term(entry, labels, is_control=True))
            else:
                own = owned(self._axes(entry, dim), Mixed(POSITIONS))
                labels = tuple(own for _ in range(entry.ndim))
                terms.append(index_term(entry, labels))
        return terms

    def value_labels(self, value: Operand) -> tuple[Label, ...]:
        """Dims of the value, aligned with the dims of `x[key]` from the right."""
        target: list[Label] = [None] * self.result_ndim
        for entry, dim, width in self.entries:
            if width and dim in self.result_dim:
                part = _is_part(entry)
                target[self.result_dim[dim]] = Mixed(POSITIONS) if part else dim
        for entry, dim, _ in self.tensors:
            first = 0 if entry.is_bool else self.index_ndim - entry.ndim
            for k in range(first, self.index_ndim):
                if entry.is_bool:
                    target[self.index_at + k] = Mixed(POSITIONS)
                else:
                    own = owned(self._axes(entry, dim), Mixed(POSITIONS))
                    target[self.index_at + k] = own
        shift = self.result_ndim - value.ndim
        for entry, dim, _ in self.tensors:
            for k in range(0 if entry.is_bool else entry.ndim):
                at = self.index_at + self.index_ndim - entry.ndim + k - shift
                if at >= 0 and (value.shape[at] != 1 or value.cut_axes(at)):
                    check_rows(self._axes(entry, dim), entry, value, k, at)
        return tuple(
            None if value.is_one_row(d) else target[d + shift] for d in range(value.ndim)
        )


def _ends(entry: Any) -> tuple[Any, Any, Any]:
    return entry.start, entry.stop, entry.step


def _check_class(entry: Any, input: Operand) -> None:
    """Refuse a class of subscript that is not known, also at the end of a slice."""
    if isinstance(entry, slice):
        for end in _ends(entry):
            if end is not None and not (_is_int(end) or _is_number(end)):
                raise Refusal(
                    "the ends of a slice are whole numbers, or tensors of one",
                    operand=end if isinstance(end, Operand) else input,
                    expected="whole numbers in the slice",
                )
    elif not (entry is None or _is_int(entry) or isinstance(entry, Operand)):
        raise Refusal(
            f"a subscript of class {type(entry).__name__} is not known: use a tensor that "
            "says what it indexes",
            operand=input,
            expected="numbers, slices, None, ... or tensors",
        )


def _width(entry: Any) -> int:
    return entry.ndim if isinstance(entry, Operand) and entry.is_bool else 1


def _is_int(entry: object) -> bool:
    return isinstance(entry, int) and not isinstance(entry, bool)


def _is_number(entry: object) -> bool:
    """Whether it is a tensor of one whole number."""
    if not isinstance(entry, Operand) or not entry.dtype.startswith(("int", "uint")):
        return False
    return not (entry.ndim or entry.type.pads)


def _is_one_row(entry: object) -> bool:
    """Whether it is an integer, or a tensor of one: the dim is gone then."""
    is_tensor = isinstance(entry, Operand) and not (entry.ndim or entry.is_bool)
    return is_tensor or _is_int(entry)


def _is_start(entry: Any) -> bool:
    """Whether it is a slice of the first rows, on all ranks."""
    if not isinstance(entry, slice):
        return False
    bounds = cast(Any, entry)
    if any(isinstance(end, RankInt | Operand) for end in (bounds.start, bounds.step)):
        return False
    return bounds.start in (None, 0) and bounds.step in (None, 1)


def _is_part(entry: Any) -> bool:
    """Whether a slice may leave rows out; one that names its end is taken at its word.

    An end that is as long as this rank's piece says nothing of the other ranks' pieces.
    """
    if not isinstance(entry, slice):
        return False
    bounds = cast(Any, entry)
    return not (_is_start(entry) and bounds.stop is None)
