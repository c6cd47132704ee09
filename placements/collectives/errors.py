"""The errors of collectives and casts. Nothing here runs for a call that is right."""

from torch import Tensor

from placements.inference.fixes import Fix, call_text, cost
from placements.inference.terms import Refusal
from placements.inference.transitions import choices, find
from placements.runtime.callsite import name_of
from placements.runtime.describe import described
from placements.runtime.errors import (
    PlacementError,
    padded_at,
    refused,
    refused_call,
    wrong_type,
)
from placements.types.axis import AxisType, P, R, Shard, V
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType
from placements.types.text import print_word

_REDUCTIONS = ("all_reduce", "reduce_scatter")
_CASTS = ("convert", "reinterpret")


def no_axis_of_mesh(call: str, group: str) -> PlacementError:
    """Return the error for a process group of which the current mesh knows no axis."""
    return refused(
        call,
        f"the process group {group!r} is no axis of the current mesh",
        axis=group,
        advice="name an axis of the current mesh",
    )


def on_another_mesh(
    call: str, x: Tensor, known: TensorType, axis: str, mesh: Mesh
) -> PlacementError:
    """Return the error for a tensor that does not live on the mesh whose axis is named."""
    return wrong_type(
        call, x, known, axis, f"a tensor on {mesh!r}", f"on {known.mesh!r}",
        rule="a collective runs over an axis of the mesh that the tensor lives on",
        advice=f"reinterpret_mesh({name_of(x, call) or 'x'}, mesh)",
    )  # fmt: skip


def wrong_source(
    call: str, x: Tensor, known: TensorType, axis: str, src: AxisType, dst: AxisType
) -> PlacementError:
    """Return the error for a tensor that is not what `src` says."""
    actual = known[axis]
    return wrong_type(
        call, x, known, axis, print_word(src), print_word(actual),
        rule="src must be the type that the tensor has",
        fixes=_from_actual(call, name_of(x, call) or "x", axis, actual, dst),
        advice=_own_summand(actual, src),
    )  # fmt: skip


def _own_summand(src: AxisType, dst: AxisType) -> str:
    """Return what to do where a rank wants the summand that it has, as its own value."""
    if (src.letter, dst.letter) != ("P", "V"):
        return ""
    return (
        "each rank's own share is Varying if what was summed is: reinterpret that first, "
        "src=S(dim), dst=V"
    )


def _from_actual(
    call: str, name: str, axis: str, actual: AxisType, dst: AxisType
) -> list[Fix]:
    """Return the same call from the type that the tensor has, if there is such a call."""
    row = find(call, actual, dst)
    if row is None or (row.action == "recut" and repr(actual) == repr(dst)):
        return []
    return [Fix(call_text(call, name, axis, actual, dst), *cost(row, axis))]


def extent_left_out(
    call: str, x: Tensor, known: TensorType, axis: str, src: AxisType
) -> PlacementError:
    """Return the error for a `src` that does not say how an uneven cut was made."""
    actual = known[axis]
    assert isinstance(actual, Shard) and actual.extent is not None
    equal = len(set(actual.extent.sizes)) == 1
    how = f"cut {'into other runs' if equal else 'unevenly'}, {actual.extent!r}"
    return wrong_type(
        call, x, known, axis, f"src={actual!r}", f"{how}, and src={src!r}",
        rule="with checking off nothing else tells the collective which rows each rank "
        "holds",
        advice=f"src={actual!r}",
    )  # fmt: skip


def untypable(
    call: str, x: Tensor, known: TensorType, axis: str, refusal: Refusal
) -> PlacementError:
    """Return the error for a transition whose result has no type."""
    if refusal.pads is not None:
        return padded_at(call, x, known, refusal.reason)
    held = known.get(refusal.axis or axis)  # an axis of one rank has no type
    return wrong_type(
        call, x, known, refusal.axis, refusal.expected,
        f"of shape {tuple(x.shape)}" if held is None else print_word(held),
        rule=refusal.reason,
    )  # fmt: skip


def gradient_dropped(call: str, x: Tensor) -> PlacementError:
    """Return the error for a result under no_grad() that is cut off from `x`."""
    name = name_of(x, call) or "x"
    return refused_call(
        call,
        f"{name} needs a gradient, which no_grad() drops here",
        name=name,
        rule="what is computed from the result would train without its share",
        operands=[described(x, None, name)],
        advice=f"call it outside no_grad(), or say that no gradient is meant: "
        f"{name}.detach()",
    )


def no_such_transition(
    call: str, x: Tensor, axis: str, src: AxisType, dst: AxisType
) -> PlacementError:
    """Return the error for a pair of types that the call does not take."""
    name, expected = name_of(x, call) or "x", ", ".join(choices(call))
    advice = _advice(call, name, axis, src, dst)
    rule = ""
    if call in _REDUCTIONS:
        rule = "a reduction sums values that are pending a sum, and nothing else"
    elif isinstance(src, Shard) and isinstance(dst, Shard) and src.dim == dst.dim:
        rule = "no one call moves rows from one cut of a dim to another cut of it"
        whole = call_text("all_gather", name, axis, src, R)
        advice = call_text("convert", whole, axis, R, dst)
    return refused_call(
        call,
        f"{name} on axis {axis!r} from {print_word(src)} to {print_word(dst)}, expected "
        f"one of {expected}",
        name=name,
        axis=axis,
        actual=f"{src!r} -> {dst!r}",
        expected=expected,
        rule=rule,
        advice=advice,
    )


def _advice(call: str, name: str, axis: str, src: AxisType, dst: AxisType) -> str:
    if call in _REDUCTIONS and src.letter == "S":
        other = find("redistribute", src, dst)  # the pieces are put together, not added
        return "" if other is None else call_text(other.call, name, axis, src, dst)
    if call in _REDUCTIONS and src.letter == "V":
        summands = call_text("reinterpret", name, axis, V, P)
        return f"if the values really are summands, say so: {summands}"
    if call in _REDUCTIONS and src.letter in "RI":
        return "the values are equal on all ranks already; a sum would count them n times"
    if call in _CASTS and _own_summand(src, dst):
        return _own_summand(src, dst)
    other = find("redistribute", src, dst)
    return "" if other is None else call_text(other.call, name, axis, src, dst)
