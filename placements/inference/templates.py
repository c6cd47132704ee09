"""A type for any sizes: what inference gives for all calls that differ in sizes alone.

A program whose shapes change makes the same calls with other sizes, and most ops ask little
of a size: whether it is 1, and whether it equals another one. So a call is inferred once
more with sizes and extents that have no value. They answer what is the same for all calls
of one pattern, and raise at every other question. If nothing was asked that raises, then
the result, with the extents of another call put in, is the type of that call too.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

from placements.inference.numbers import FactsIdentity
from placements.inference.terms import Operand
from placements.types.axis import AxisType, Shard
from placements.types.extents import Even, Extent, Rows
from placements.types.mesh import Mesh
from placements.types.tensor import Identity, TensorType


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
for _name in _QUESTIONS.split():
    setattr(_AnySize, f"__{_name}__", _asked)


class _AnyEven(Extent):
    """Even pieces, of which the pattern says which other extents are the same."""

    def __init__(self, number: int, ranks: int | None) -> None:
        self.number, self.ranks = number, ranks

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


class Pattern:
    """A call without its sizes: sizes and even extents are numbered, equal ones alike.

    Sizes 0 and 1 stay, because broadcasting asks for them. Extents of other kinds stay.
    `key` is that of the memo, a tuple of types, shapes and other arguments; in it the only
    tuples of a class of their own are shapes.
    """

    def __init__(self, mesh: Mesh, key: tuple[Any, ...]) -> None:
        self.mesh = mesh
        self.sizes: dict[int, int] = {}
        self.numbers: dict[tuple[int, int | None], int] = {}
        self.extents: list[Extent] = []
        self.key: tuple[Any, ...] = self._seen(key)

    def _seen(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        parts: list[Any] = []
        for part in key:
            kind = part.__class__
            if kind is tuple:
                part = self._seen(part)
            elif kind is Identity:
                part = self._type(part)
            elif kind is FactsIdentity:
                raise SizeMatters
            elif isinstance(part, tuple):
                part = self._shape(cast(Any, part))
            parts.append(part)
        return tuple(parts)

    def _shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return sizes from 2 on as negative numbers, in order of appearance."""
        sizes = self.sizes
        return tuple([
            size if size < 2 else sizes.setdefault(size, -1 - len(sizes)) for size in shape
        ])  # fmt: skip

    def _type(self, identity: Identity) -> Any:
        found = identity.type
        if found.mesh is not self.mesh:
            raise SizeMatters
        if not found.cut_dims:
            return identity
        types = [
            (t.dim, self._extent(t.extent)) if isinstance(t, Shard) else t
            for t in found.types
        ]
        return (*types, found.orders, found.index, found.fresh, found.pads)

    def _extent(self, extent: Extent | None) -> Any:
        if not isinstance(extent, Even):
            return extent
        numbers = self.numbers
        number = numbers.setdefault((extent.rows_in_all, extent.ranks), len(numbers))
        if number == len(self.extents):
            self.extents.append(extent)
        return number

    def known(self) -> Any:
        """Return the type of the call by what was learned before; None if nothing was."""
        template = self.mesh.templates.get(self.key)
        if template is None or isinstance(template, str):
            return None
        return self._filled(template)

    def learn(self, infer: Callable[[Sequence[Operand]], Any], operands: Any) -> None:
        """Keep what `infer` gives for any sizes, when the pattern is met again."""
        templates = self.mesh.templates
        if len(templates) >= _MOST:
            templates.clear()
        if self.key not in templates:
            templates[self.key] = _MET
        elif templates[self.key] is _MET:
            try:
                template = infer(self._without_values(operands))
            except (SizeMatters, Exception):
                template = _SIZES_MATTER
            templates[self.key] = template

    def _without_values(self, operands: Sequence[Operand]) -> list[Operand]:
        """Return the operands of the call, with sizes and extents that have no value."""
        sizes = {size: _AnySize() for size in self.sizes}
        extents = [_AnyEven(k, extent.ranks) for k, extent in enumerate(self.extents)]

        def without_value(t: AxisType) -> AxisType:
            if not (isinstance(t, Shard) and isinstance(t.extent, Even)):
                return t
            return Shard(t.dim, extents[self.numbers[t.extent.rows_in_all, t.extent.ranks]])

        return [
            Operand(
                _changed(operand.type, without_value),
                tuple([cast(int, sizes.get(size, size)) for size in operand.shape]),
                operand.dtype,
                operand.position,
            )
            for operand in operands
        ]

    def _filled(self, template: Any) -> Any:
        """Return the types of a template with the extents of this call."""
        if isinstance(template, TensorType):
            return _changed(template, self._with_value)
        return type(template)(self._filled(one) for one in template)

    def _with_value(self, t: AxisType) -> AxisType:
        if isinstance(t, Shard) and isinstance(t.extent, _AnyEven):
            return Shard(t.dim, self.extents[t.extent.number])
        return t


def _changed(found: TensorType, change: Callable[[AxisType], AxisType]) -> TensorType:
    if not found.cut_dims:
        return found
    types = tuple([change(t) for t in found.types])
    return TensorType(found.mesh, types, found.orders, found.index, found.fresh, found.pads)


def pattern_of(mesh: Mesh, key: tuple[Any, ...]) -> Pattern | None:
    """Return the pattern of a call; None if its numbers or meshes do not fit one."""
    try:
        return Pattern(mesh, key)
    except SizeMatters:
        return None
