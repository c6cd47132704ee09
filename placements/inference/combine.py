"""Pure inference: operands and where their dims go -> the type of the result.

No tensor is touched here, and nothing is known of tags, modes or meshes at run time.
A flow (see `flows/`) describes one op as terms: an operand, and for each of its dims a
label that says where the dim goes.
"""

from collections.abc import Sequence
from dataclasses import replace

from placements.inference.padding import AtPads, result_pads
from placements.inference.rules import (
    DIM_REASONS,
    LINEAR,
    MULTILINEAR,
    NONLINEAR,
    PARTIAL_PLUS_NUMBER,
    Linearity,
    join,
)
from placements.inference.terms import (
    FLOATING,
    Addressed,
    Contract,
    Label,
    Mixed,
    Operand,
    Refusal,
    Scattered,
    Term,
)
from placements.types.axis import BY_LETTER, AxisType, R, Shard, V
from placements.types.extents import Extent
from placements.types.index import Computed, Index
from placements.types.mesh import Mesh
from placements.types.tensor import FILLED, LEAF, MADE, TensorType, make


def combine(
    linearity: Linearity,
    terms: Sequence[Term],
    *,
    index: Index | Computed | None = None,
    adds_number: bool = False,
    at_pads: AtPads | None = None,
) -> TensorType:
    """Return the type of an op's result.

    `adds_number`: a non-zero Python number is one of the op's values. `at_pads`: what the
    op makes of rows of padding, where its linearity alone does not say.
    """
    mesh = _common_mesh(terms)
    terms = [_as_numbers(term, index) for term in terms]
    sources = [term.operand.type.fresh for term in terms]
    fresh = MADE if all(sources) and LEAF not in sources else None
    if fresh is not None and not adds_number and _only_moves_dims(linearity, terms):
        fresh = terms[0].operand.type.fresh
    types = {axis: _join_axis(axis, linearity, terms, adds_number) for axis in mesh.axes}
    if [axis for axis in types if types[axis] is V]:
        _forget_outer_cuts(types, terms)
    result = make(mesh, _in_order(types, terms), index, fresh)
    if not any(term.operand.type.pads for term in terms):
        return result
    return result.with_pads(result_pads(linearity, terms, result, adds_number, at_pads))


def _common_mesh(terms: Sequence[Term]) -> Mesh:
    # A constant of plain sizes is the same on any mesh.
    placed = [term for term in terms if not _is_same_anywhere(term)] or terms
    mesh = placed[0].operand.type.mesh
    for term in placed[1:]:
        other = term.operand.type.mesh
        if other is not mesh and other != mesh:
            raise Refusal(
                f"the operands live on different presentations of the ranks: {mesh!r} "
                f"and {other!r}; reinterpret_mesh moves a tensor between them",
                operand=term.operand,
                expected=f"a type on {mesh!r}",
            )
    return mesh


def _as_numbers(term: Term, index: Index | Computed | None) -> Term:
    """Make an index of own rows Varying where its elements are taken for numbers.

    Rank r counts its rows from 0, so as numbers they are no pieces of the numbers that one
    device has. As an index of those rows they are, and the result may be such an index.
    """
    found = term.operand.type
    if found.index is None or term.is_index or found.index == index:
        return term
    numbers = as_numbers(found)
    if numbers is found:
        return term
    return replace(term, operand=replace(term.operand, type=numbers))


def as_numbers(found: TensorType) -> TensorType:
    """Return the type of a tensor whose elements are taken for numbers, not for rows."""
    domain = found.index
    if not isinstance(domain, Index) or not domain.cuts:
        return found
    own = {axis for axis, _ in domain.cuts}
    for order in found.cut_dims.values():
        counted = [k for k, axis in enumerate(order) if axis in own]
        own |= set(order[: max(counted, default=0)])
    types = {axis: V if axis in own else t for axis, t in found.items()}
    return make(found.mesh, types, domain, found.fresh).with_pads(found.pads)


def _is_same_anywhere(term: Term) -> bool:
    found = term.operand.type
    return found.is_number and all(t.letter == "R" for t in found.types)


def _only_moves_dims(linearity: Linearity, terms: Sequence[Term]) -> bool:
    """Return whether one number, given a shape, is still that number afterwards."""
    return (
        linearity is LINEAR
        and len(terms) == 1
        and not terms[0].is_control
        and all(isinstance(label, int | None) for label in terms[0].labels)
    )


def _label(term: Term, dim: int, axis: str) -> Label:
    label = term.labels[dim]
    if isinstance(label, Addressed) and axis not in label.axes:
        return label.otherwise
    return label


def _join_axis(
    axis: str, linearity: Linearity, terms: Sequence[Term], adds_number: bool
) -> AxisType:
    values: list[tuple[str, Term]] = []
    controls: list[tuple[str, Term]] = []
    constants: list[tuple[str, Term]] = []
    kept: list[tuple[int, Extent, Term]] = []
    contracted: dict[str, list[tuple[Extent, Term]]] = {}
    for term in terms:
        shard = term.operand.type.by_axis.get(axis, R)
        letter = shard.letter
        if letter == "R" and term.operand.type.is_number and len(terms) > 1:
            # A constant is the same on all ranks, and has no gradient: it goes with any
            # type, but one other than zero is no term of a sum.
            is_term = term.operand.type.fresh == FILLED and not term.is_control
            adds_number = adds_number or is_term
            constants.append((letter, term))
            continue
        if isinstance(shard, Shard):
            label = _label(term, shard.dim, axis)
            assert shard.extent is not None
            if isinstance(label, Mixed):
                raise Refusal(label.reason, axis, term.operand, "a dim that is not cut")
            if isinstance(label, Contract):
                contracted.setdefault(label.key, []).append((shard.extent, term))
                continue
            if isinstance(label, int):
                kept.append((label, shard.extent, term))
            elif isinstance(label, Scattered):
                letter = "V"
        (controls if term.is_control else values).append((letter, term))
    if not (values or controls or contracted):
        values = [pair for pair in constants if not pair[1].is_control]
        controls = [pair for pair in constants if pair[1].is_control]
    place = _agree_on_dim(axis, kept, terms)
    for key, cuts in contracted.items():
        letter = _contract(axis, key, cuts, terms)
        values.append((letter, cuts[0][1]))
        if letter == "P" and linearity is NONLINEAR:
            linearity = MULTILINEAR  # the sum is the outermost step of the op
    return _joined(axis, linearity, values, controls, place, adds_number)


def _agree_on_dim(
    axis: str, kept: Sequence[tuple[int, Extent, Term]], terms: Sequence[Term]
) -> Shard | None:
    """Return the Shard of the result, if the operands that are cut agree on it."""
    if not kept:
        return None
    dim, extent, first = kept[0]
    for other_dim, other_extent, term in kept[1:]:
        if other_dim != dim:
            raise Refusal(
                DIM_REASONS["other dim"], axis, term.operand, f"S({dim}) of the result"
            )
        if other_extent != extent:
            raise Refusal(
                f"{DIM_REASONS['other extent']}: {extent!r} and {other_extent!r}",
                axis, term.operand, repr(extent),
            )  # fmt: skip
    cut = {id(term) for _, _, term in kept}
    for term in terms:
        if id(term) in cut or term.operand.type.by_axis.get(axis, R).letter == "V":
            continue
        if dim in [_label(term, d, axis) for d in range(len(term.labels))]:
            letter = term.operand.type.by_axis.get(axis, R).letter
            if letter == "P" or (letter == "I" and term.operand.can_have_gradient):
                continue  # the table refuses it for the better reason
            raise Refusal(
                DIM_REASONS["whole operand"], axis, term.operand,
                f"cut like the other operand, {first.operand.type[axis]!r}",
            )  # fmt: skip
    held = first.operand.type.by_axis[axis]
    if isinstance(held, Shard) and held.dim == dim:
        return held
    return Shard(dim, extent)


def _contract(
    axis: str,
    key: str,
    cuts: Sequence[tuple[Extent, Term]],
    terms: Sequence[Term],
) -> str:
    """Return the letter of a contraction in which these operands are cut."""
    extent, first = cuts[0]
    for other, term in cuts[1:]:
        if other != extent:
            raise Refusal(
                f"{DIM_REASONS['other extent']}: {extent!r} and {other!r}",
                axis, term.operand, repr(extent),
            )  # fmt: skip
    cut = {id(term) for _, term in cuts}
    for term in terms:
        labels = [_label(term, d, axis) for d in range(len(term.labels))]
        if id(term) in cut or Contract(key) not in labels:
            continue
        if term.operand.type.by_axis.get(axis, R).letter == "V":
            return "V"
        raise Refusal(
            DIM_REASONS["half contraction"], axis, term.operand,
            f"cut like the other operand, {first.operand.type[axis]!r}",
        )  # fmt: skip
    return "P"


def _joined(
    axis: str,
    linearity: Linearity,
    values: Sequence[tuple[str, Term]],
    controls: Sequence[tuple[str, Term]],
    place: Shard | None,
    adds_number: bool,
) -> AxisType:
    # R and I differ in their gradients only, so what is equal on all ranks and has none,
    # a whole number, a bool or a factory's constant, goes with either: it is I among I,
    # and R among all others.
    every = [*values, *controls]
    equal = {
        id(term)
        for letter, term in every
        if letter in "RI" and not _takes_gradient(term.operand)
    }
    others = {letter for letter, term in every if id(term) not in equal}
    kind = {letter for letter, _ in every} if not others else others
    as_letter = "I" if kind == {"I"} else "R"
    value_letters = [as_letter if id(term) in equal else x for x, term in values]
    control_letters = [as_letter if id(term) in equal else x for x, term in controls]
    rule = join(linearity, value_letters, control_letters)
    if rule.gives == "P" and linearity is LINEAR and adds_number:
        rule = PARTIAL_PLUS_NUMBER
    if rule.gives is None:
        guilty, expected = _blame(every)
        raise Refusal(rule.reason, axis, guilty.operand, expected, rule.kind)
    if rule.gives != "S":
        return BY_LETTER[rule.gives]
    if place is None:
        return BY_LETTER["V"]
    return place


def _takes_gradient(operand: Operand) -> bool:
    return operand.dtype.startswith(FLOATING) and operand.type.fresh != MADE


def _blame(letters: Sequence[tuple[str, Term]]) -> tuple[Term, str]:
    """Return the operand to name in an error, and what it should have been."""
    named = [(x, term) for x, term in letters if term.operand.position >= 0]
    for letter in "IP":
        for found, term in named:
            if found == letter:
                return term, "Replicate"
    # In a sum inside the op (a product plus its bias), only the other term has a name.
    present = {x for x, _ in letters}
    words = [word for x, word in (("I", "Invariant"), ("P", "Partial")) if x in present]
    return (named or letters)[0][1], (words or ["Replicate"])[0]


def _in_order(types: dict[str, AxisType], terms: Sequence[Term]) -> dict[str, AxisType]:
    """Return the axis types, ordered so that cuts of one dim keep the operands' order."""
    ordered: list[str] = []
    by_dim: dict[int, list[str]] = {}
    for axis, t in types.items():
        if isinstance(t, Shard):
            by_dim.setdefault(t.dim, []).append(axis)
    for dim, axes in by_dim.items():
        if len(axes) == 1:
            ordered += axes
            continue
        orders: set[tuple[str, ...]] = set()
        for term in terms:
            found = _order_in(term, dim, set(axes))
            if len(found) == len(axes):
                orders.add(found)
        if len(orders) > 1:
            raise Refusal(
                f"{DIM_REASONS['other order']}: {sorted(orders)}",
                axes[0], terms[-1].operand, str(sorted(orders)[0]),
            )  # fmt: skip
        ordered += orders.pop() if orders else axes
    rest = [axis for axis in types if axis not in ordered]
    return {axis: types[axis] for axis in [*ordered, *rest]}


def _forget_outer_cuts(types: dict[str, AxisType], terms: Sequence[Term]) -> None:
    """Make Varying what is cut outside a cut that became Varying.

    The outer pieces are made of the inner ones: when those are each rank's own, nobody
    holds a piece of the outer cut any more.
    """
    for term in terms:
        for order in term.operand.type.cut_dims.values():
            lost = [k for k, axis in enumerate(order) if types[axis] == V]
            for axis in order[: max(lost, default=0)]:
                types[axis] = V


def _order_in(term: Term, dim: int, axes: set[str]) -> tuple[str, ...]:
    for d, cut in term.operand.type.cut_dims.items():
        order = tuple(a for a in cut if a in axes)
        if order and all(_label(term, d, axis) == dim for axis in order):
            return order
    return ()
