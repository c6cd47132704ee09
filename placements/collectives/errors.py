"""What can be wrong with a transition that was called, and how it is said."""

from torch import Tensor

from placements.inference.fixes import Fix
from placements.inference.terms import Refusal
from placements.inference.transitions import choices, cost, find
from placements.runtime.callsite import caller, name_of
from placements.runtime.describe import described, padded_at
from placements.runtime.errors import PlacementError, mismatch
from placements.types.axis import WORDS, AxisType, Shard
from placements.types.extents import Extent
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType

_REDUCTIONS = ("all_reduce", "reduce_scatter")


def _word(t: AxisType) -> str:
    return repr(t) if isinstance(t, Shard) else WORDS[t.letter]


def check_mesh(
    call: str, x: Tensor, known: TensorType, axis: str, mesh: Mesh | None
) -> None:
    """The tensor must live on the mesh whose axis is named."""
    if mesh is None:
        raise PlacementError(
            f"{call}: the process group {axis!r} is no axis of the current mesh",
            where=call,
            axis=axis,
            advice="name an axis of the current mesh",
        )
    if known.mesh != mesh and not known.is_number:
        name = name_of(x) or "x"
        raise mismatch(
            f"{call} at {caller()}", name, axis,
            f"a tensor on {mesh!r}", f"on {known.mesh!r}",
            rule="a collective runs over an axis of the mesh that the tensor lives on",
            operands=[described(x, known)],
            advice=f"reinterpret_mesh({name}, mesh)",
        )  # fmt: skip


def check_source(
    call: str, x: Tensor, known: TensorType, axis: str, src: AxisType, dst: AxisType
) -> None:
    """The tensor must be what `src` says, and an uneven `src` must say how it is cut."""
    if known.is_number and src.letter in "RI":
        return
    actual, name = known[axis], name_of(x) or "x"
    if actual != src:
        raise mismatch(
            f"{call} at {caller()}", name, axis, _word(src), _word(actual),
            rule="src must be the type that the tensor has",
            operands=[described(x, known)],
            fixes=_from_actual(call, name, axis, actual, dst),
        )  # fmt: skip
    if isinstance(src, Shard) and isinstance(actual, Shard) and src.extent is None:
        assert actual.extent is not None
        if not actual.extent.is_even:
            raise mismatch(
                f"{call} at {caller()}", name, axis,
                f"src={actual!r}", f"{_how_cut(actual.extent)}, and src={src!r}",
                rule="with checking off nothing else tells the collective which rows "
                "each rank holds",
                operands=[described(x, known)],
                advice=f"src={actual!r}",
            )  # fmt: skip


def _from_actual(
    call: str, name: str, axis: str, actual: AxisType, dst: AxisType
) -> list[Fix]:
    """The same call from the type that the tensor has, if there is such a call."""
    row = find(call, actual, dst)
    if row is None or (row.action == "recut" and repr(actual) == repr(dst)):
        return []
    text = f"{call}({name}, {axis!r}, src={actual!r}, dst={dst!r})"
    return [Fix(text, *cost(row, axis))]


def _how_cut(extent: Extent) -> str:
    equal = len(set(extent.sizes)) == 1
    return f"cut {'into other runs' if equal else 'unevenly'}, {extent!r}"


def refused(
    call: str, x: Tensor, known: TensorType, axis: str, refusal: Refusal
) -> PlacementError:
    """The error for a transition that cannot be typed."""
    if refusal.pads is not None:
        return padded_at(call, x, known, refusal.reason)
    held = known.get(refusal.axis or axis)  # an axis of one rank has no type
    return mismatch(
        f"{call} at {caller()}", name_of(x) or "x", refusal.axis, refusal.expected,
        f"of shape {tuple(x.shape)}" if held is None else _word(held),
        rule=refusal.reason, operands=[described(x, known)],
    )  # fmt: skip


def no_such_transition(
    call: str, x: Tensor, axis: str, src: AxisType, dst: AxisType
) -> PlacementError:
    """The error for a pair of types that the call does not take."""
    expected = ", ".join(choices(call))
    advice = _advice(call, name_of(x) or "x", axis, src, dst)
    rule = ""
    if call in _REDUCTIONS:
        rule = "a reduction sums values that are pending a sum, and nothing else"
    elif isinstance(src, Shard) and isinstance(dst, Shard) and src.dim == dst.dim:
        rule = "no one call moves rows from one cut of a dim to another cut of it"
        advice = _gather_and_cut(name_of(x) or "x", axis, src, dst)
    return PlacementError(
        f"{call} at {caller()}: {name_of(x) or 'x'} on axis {axis!r} from {_word(src)} to "
        f"{_word(dst)}, "
        f"expected one of {expected}",
        where=call,
        name=name_of(x) or "x",
        axis=axis,
        actual=f"{src!r} -> {dst!r}",
        expected=expected,
        rule=rule,
        advice=advice,
    )


def _gather_and_cut(name: str, axis: str, src: AxisType, dst: AxisType) -> str:
    gather = f"all_gather({name}, {axis!r}, src={src!r}, dst=R)"
    return f"convert({gather}, {axis!r}, src=R, dst={dst!r})"


def _advice(call: str, name: str, axis: str, src: AxisType, dst: AxisType) -> str:
    if call in _REDUCTIONS and src.letter in "VS":
        return (
            f"if the values really are summands, say so: "
            f"reinterpret({name}, {axis!r}, src=V, dst=P)"
        )
    if call in _REDUCTIONS and src.letter in "RI":
        return "the values are equal on all ranks already; a sum would count them n times"
    other = find("redistribute", src, dst)
    if other is None:
        return ""
    return f"{other.call}({name}, {axis!r}, src={src!r}, dst={dst!r})"
