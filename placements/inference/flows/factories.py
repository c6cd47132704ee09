"""Flows of factories: tensors that come from no other tensor's values."""

from typing import Any

from placements.inference import padding
from placements.inference.combine import combine
from placements.inference.flows.broadcast import is_number
from placements.inference.number_operands import chosen_by
from placements.inference.numbers import NUMBER, RankFloat, RankInt, facts_of
from placements.inference.op import Op
from placements.inference.rules import MULTILINEAR
from placements.inference.sizes import sizes_of, type_of_sizes
from placements.inference.terms import NO_ARGUMENT, Operand, Refusal, Term
from placements.types.axis import AxisType, R, Shard, V
from placements.types.index import Index
from placements.types.mesh import Mesh
from placements.types.tensor import EMPTY, FILLED, MADE, ZERO, TensorType, make


def full(op: Op, mesh: Mesh, size: Any, fill_value: Any, dtype: Any = None) -> TensorType:
    """One number in every place of a tensor of these sizes."""
    if isinstance(fill_value, Operand) and fill_value.dtype != NUMBER:
        raise Refusal(
            "a factory that takes its number from a tensor makes what that tensor is; "
            "expand the tensor instead",
            operand=fill_value,
            expected="a Python number",
        )
    fill = ZERO if is_number(fill_value) and fill_value == 0 else FILLED
    mesh, sizes = _mesh_of(size, mesh), sizes_of(size)
    made = type_of_sizes(mesh, sizes, fill)
    if isinstance(fill_value, Operand):
        shape = Operand(made, tuple(n.rows for n in sizes), "bool", NO_ARGUMENT)
        every = tuple(range(len(sizes)))
        made = combine(
            MULTILINEAR, [Term(fill_value, ()), Term(shape, every, is_control=True)]
        )
    if isinstance(size, Operand):
        made = made.with_pads(padding.in_shape_of(size, 0 if fill == ZERO else None))
    return made


def _mesh_of(size: Any, current: Mesh) -> Mesh:
    """A tensor like another one lives on the mesh of that one, as its clone would."""
    return size.type.mesh if isinstance(size, Operand) else current


def uninitialised(
    op: Op,
    mesh: Mesh,
    size: Any,
    stride: Any = None,
    dtype: Any = None,
) -> TensorType:
    """empty: what the memory held, unrelated on every rank until it is overwritten.

    In the sizes of a piece it is a piece, whatever it holds.
    """
    mesh = _mesh_of(size, mesh)
    sized = type_of_sizes(mesh, sizes_of(size), EMPTY)
    fresh = MADE if V in sized.types else EMPTY  # plain sizes can be filled alike
    types = {axis: V if t == R else t for axis, t in sized.items()}
    return make(mesh, types, fresh=fresh)


def numbered(
    op: Op, mesh: Mesh, end: Any, start: Any = 0, step: Any = 1, dtype: Any = None
) -> TensorType:
    """arange: the same on all ranks; up to the size of a piece, an index of its rows.

    Of plain numbers nothing says which rows they count: those of a dim of as many rows, or
    the first rows of a longer one.
    """
    made = counted(op, mesh, start=start, end=end, step=step)
    facts = facts_of(end)
    own = {axis for axis, _ in facts.cuts}
    counts_rows = own and own == {axis for axis, _ in facts.letters} <= set(mesh.axes)
    if counts_rows and not facts.counts_padding and (start, step) == (0, 1):
        types: dict[str, AxisType] = {axis: Shard(0, e) for axis, e in facts.cuts}
        rest = {axis: R for axis in mesh.axes if axis not in types}
        return make(mesh, {**types, **rest}, Index.of_cuts(facts.cuts), MADE)
    return chosen_by(made, end) if isinstance(end, RankInt | RankFloat) else made


def counted(op: Op, mesh: Mesh, dtype: Any = None, **numbers: Any) -> TensorType:
    """linspace, eye: numbers that are the same on all ranks."""
    for value in numbers.values():
        if isinstance(value, Operand):
            raise Refusal(
                "a factory that takes its numbers from a tensor makes what that tensor is; "
                "add the tensor to an arange of plain numbers",
                operand=value,
                expected="a Python number",
            )
    return make(mesh, {axis: R for axis in mesh.axes}, fresh=MADE)
