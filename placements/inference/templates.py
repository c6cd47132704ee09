"""A type for any sizes: what inference gives for all calls that differ in sizes alone.

A program whose shapes change makes the same calls with other sizes, and most ops ask little
of a size: whether it is 1, and whether it equals another one. So a call is inferred once
more with sizes and extents that have no value. They answer what is the same for all calls
of one pattern, and raise at every other question. If nothing was asked that raises, then
the result, with the extents of another call put in, is the type of that call too. Where an
op takes no other numbers than sizes (a view, zeros), those have no value either.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from placements.inference.nested import mapped
from placements.inference.numbers import FactsIdentity, RankInt
from placements.inference.sizes import sizes_of
from placements.inference.terms import Operand
from placements.types.axis import AxisType, Shard
from placements.types.extents import Even, Extent, Rows
from placements.types.mesh import Mesh
from placements.types.tensor import Identity, TensorType, one_of


class SizeMatters(BaseException):
    """Inference asked for more of a size than the pattern of the call says."""


def _asked(*_: object) -> NoReturn:
    raise SizeMatters


class _AnySize:
    """A size of at least 2, of which the pattern says which other sizes are equal."""

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _AnySize):
            return self is other
        if isinstance(other, int) and other < 2:
            return False
        raise SizeMatters

    def __bool__(self) -> bool:
        return True

    __hash__ = _asked  # pyright: ignore[reportAssignmentType, reportUnannotatedClassAttribute]


_QUESTIONS = (
    "int float index lt le gt ge len iter getitem contains neg pos abs invert round "
    "trunc floor ceil add sub mul truediv floordiv mod divmod pow matmul and or xor lshift "
    "rshift radd rsub rmul rtruediv rfloordiv rmod rdivmod rpow rand ror rxor rlshift "
    "rrshift str repr format"
)
for _question in _QUESTIONS.split():
    setattr(_AnySize, f"__{_question}__", _asked)


class _AnyEven(Extent):
    """Even pieces, of which the pattern says which other extents are the same."""

    equal_sizes = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, number: int, named: "Named") -> None:
        self.number, self.ranks = number, named[1]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _AnyEven):
            return self is other
        raise SizeMatters

    __hash__ = _asked  # pyright: ignore[reportAssignmentType, reportUnannotatedClassAttribute]

    @property
    def total(self) -> int:
        raise SizeMatters

    def over(self, ranks: int) -> Extent:
        raise SizeMatters

    def local_size(self, rank: int) -> int:
        raise SizeMatters

    def offset(self, rank: int) -> int:
        raise SizeMatters

    def to_global(self, index: Rows, rank: int) -> Rows:
        raise SizeMatters

    def to_local(self, row: Rows) -> tuple[Rows, Rows]:
        raise SizeMatters

    def scaled(self, factor: int) -> Extent:
        raise SizeMatters

    def divided(self, factor: int) -> Extent | None:
        raise SizeMatters

    def key(self, ranks: int | None) -> tuple[Any, ...]:
        raise SizeMatters


# Of a pattern for which there is no type for any sizes: not yet, and not at all.
_MET, _SIZES_MATTER = "met once", "sizes matter"

_MOST = 2048  # patterns that are kept on a mesh

# An even extent, by what tells it from others: how many rows, over how many ranks.
Named = tuple[int, int | None]

# What stands in a pattern for a number that is a size, and around a tuple.
_SIZE, _OPEN, _CLOSE = "size", "(", ")"


class _Template:
    """A type for any sizes, and what it was for the extents of the last call."""

    def __init__(self, found: Any) -> None:
        self.found = found
        self.last: tuple[tuple[Named, ...], Any] | None = None  # one object: threads


class Pattern:
    """A call without its sizes: sizes and even extents are numbered, equal ones alike.

    Sizes 0 and 1 stay, because broadcasting asks for them, and so does -1, which stands for
    what is left. Extents of other kinds stay. `key` is that of the memo, a tuple of types,
    shapes and other arguments.
    """

    def __init__(self, mesh: Mesh, key: tuple[Any, ...], sizes_alone: bool = False) -> None:
        self.mesh = mesh
        self.sizes_alone = sizes_alone  # whether every number of the call is a size
        self.sizes = [-1, 0, 1]
        self.extents: list[Named] = []
        self.parts: list[Any] = []
        self._see(key)
        # The place where each stands first says which are equal.
        equal_sizes = tuple(map(self.sizes.index, self.sizes))
        equal_extents = tuple(map(self.extents.index, self.extents))
        self.key: tuple[Any, ...] = (*self.parts, equal_sizes, equal_extents)

    def _see(self, key: tuple[Any, ...]) -> None:
        parts, sizes = self.parts, self.sizes
        for part in key:
            kind = part.__class__
            if kind is tuple:
                first = part[0].__class__ if part else None
                if first is Identity:
                    identity, shape, dtype = part
                    if identity.type.mesh is not self.mesh:
                        raise SizeMatters
                    if identity.type.cut_dims:
                        form, named = identity.form or self._form_of(identity)
                        parts += form, len(shape), dtype
                        self.extents += named
                    else:
                        parts += identity, len(shape), dtype
                    sizes += shape
                elif first is FactsIdentity:
                    self._number(*part)
                else:
                    parts.append(_OPEN)
                    self._see(part)
                    parts.append(_CLOSE)
            elif kind is int and self.sizes_alone:
                if part < -1:
                    raise SizeMatters
                parts.append(_SIZE)
                sizes.append(part)
            else:
                parts.append(part)

    def _form_of(self, identity: Identity) -> tuple[Identity, tuple[Named, ...]]:
        """Return what stands for a type without its even extents, and those."""
        found = identity.type
        cuts = [t for t in found.types if isinstance(t, Shard)]
        types = [
            (t.dim, _other(t.extent)) if isinstance(t, Shard) else t for t in found.types
        ]
        form = ("form", *types, found.orders, found.index, found.fresh, found.pads)
        # The first type of this form stands for all of them.
        first = self.mesh.identities.setdefault(form, identity)
        identity.form = first, _named([t.extent for t in cuts])
        return identity.form

    def _number(self, identity: FactsIdentity, kind: type, value: int) -> None:
        """List the size that a number is, and what it knows of its axes."""
        if not self.sizes_alone or kind is not RankInt or value < -1:
            raise SizeMatters
        facts = identity.facts
        cuts = tuple([(axis, _other(extent)) for axis, extent in facts.cuts])
        self.parts += FactsIdentity, facts.letters, facts.counts_padding, cuts
        self.sizes.append(value)
        self.extents += _named([extent for _, extent in facts.cuts])

    def known(self) -> Any:
        """Return the type of the call by what was learned before; None if nothing was."""
        template = self.mesh.templates.get(self.key)
        if not isinstance(template, _Template):
            return None
        last, extents = template.last, tuple(self.extents)
        if last is None or last[0] != extents:
            last = template.last = extents, self._filled(template.found)
        return last[1]

    def learn(self, infer: Callable[..., Any], operands: Sequence[Operand]) -> None:
        """Keep what `infer` gives for any sizes, when the pattern is met again."""
        templates = self.mesh.templates
        if len(templates) >= _MOST:
            templates.clear()
        if self.key not in templates:
            templates[self.key] = _MET
        elif templates[self.key] is _MET:
            try:
                template = _Template(infer(*self._without_values(operands)))
            except (SizeMatters, Exception):
                template = _SIZES_MATTER
            templates[self.key] = template

    def _without_values(
        self, operands: Sequence[Operand]
    ) -> tuple[list[Operand], Callable[[Any], Any] | None]:
        """Return the operands of the call, with sizes and extents that have no value.

        And what does the same to numbers that are sizes.
        """
        sizes: dict[int, Any] = {n: _AnySize() if n > 1 else n for n in self.sizes}
        extents = {named: _AnyEven(k, named) for k, named in enumerate(self.extents)}

        def any_extent(extent: Extent | None) -> Any:
            return extents[_name(extent)] if isinstance(extent, Even) else extent

        def any_type(t: AxisType) -> AxisType:
            return Shard(t.dim, any_extent(t.extent)) if isinstance(t, Shard) else t

        def any_size(number: Any) -> Any:
            if number.__class__ is not int and number.__class__ is not RankInt:
                return number
            (size,) = sizes_of(number)
            cuts = tuple([(axis, any_extent(extent)) for axis, extent in size.cuts])
            return replace(size, rows=sizes[size.rows], cuts=cuts)

        changed = [
            Operand(
                _changed(operand.type, any_type),
                tuple([sizes[size] for size in operand.shape]),
                operand.dtype,
                operand.position,
            )
            for operand in operands
        ]
        return changed, partial(mapped, any_size) if self.sizes_alone else None

    def _filled(self, template: Any) -> Any:
        """Return the types of a template with the extents of this call."""
        if isinstance(template, TensorType):
            return one_of(_changed(template, self._with_value))
        return type(template)(self._filled(one) for one in template)

    def _with_value(self, t: AxisType) -> AxisType:
        if isinstance(t, Shard) and isinstance(t.extent, _AnyEven):
            return Shard(t.dim, Even(*self.extents[t.extent.number]))
        return t


def _name(extent: Even) -> Named:
    return extent.rows_in_all, extent.ranks


def _named(extents: Sequence[Extent | None]) -> tuple[Named, ...]:
    return tuple([_name(extent) for extent in extents if isinstance(extent, Even)])


def _other(extent: Extent | None) -> Extent | None:
    """Return an extent that a pattern keeps; None stands for one that it numbers."""
    return None if isinstance(extent, Even) else extent


def _changed(found: TensorType, change: Callable[[AxisType], AxisType]) -> TensorType:
    if not found.cut_dims:
        return found
    types = tuple([change(t) for t in found.types])
    return TensorType(found.mesh, types, found.orders, found.index, found.fresh, found.pads)


def pattern_of(mesh: Mesh, key: tuple[Any, ...], sizes_alone: bool) -> Pattern | None:
    """Return the pattern of a call; None if its numbers or meshes do not fit one."""
    try:
        return Pattern(mesh, key, sizes_alone)
    except SizeMatters:
        return None
