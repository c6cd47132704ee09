"""The one exception about placements, and the functions that build its messages.

A message about a call of the user's begins with `call at file:line`, which `refused_call`
adds. A message about something that outlives the call (a parameter, a gradient) begins
with the name of the function that found it.
"""

import re
from collections.abc import Sequence
from typing import TypedDict, Unpack

from jaxtyping import AnnotationError
from torch import Tensor, nn

from placements._torch import in_transform
from placements.inference.fixes import Fix
from placements.runtime import dtensors, tags
from placements.runtime.callsite import located, name_of, outermost_frame
from placements.runtime.describe import described
from placements.runtime.filled import up_to_date
from placements.runtime.mesh import checked_mesh
from placements.types.padding import print_pads
from placements.types.tensor import TensorType


class PlacementError(AnnotationError, ValueError):
    """A tensor is not what its use demands across ranks.

    jaxtyping passes subclasses of its AnnotationError through unchanged. It is no
    TypeError, because Python's operators (`p + r`) swallow those.
    """

    def __init__(
        self,
        headline: str,
        *,
        where: str = "",
        name: str = "",
        axis: str | None = None,
        expected: str = "",
        actual: str = "",
        rule: str = "",
        operands: Sequence[str] = (),
        fixes: Sequence[Fix] = (),
        advice: str = "",
        branch: str = "",
    ) -> None:
        self.headline = headline
        self.where = where
        self.name = name
        self.axis = axis
        self.expected = expected
        self.actual = actual
        self.rule = rule
        self.operands = tuple(operands)
        self.fixes = tuple(fixes)
        self.advice = advice
        self.branch = branch
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [self.headline]
        if self.rule:
            lines.append(f"  rule      {self.rule}")
        for k, operand in enumerate(self.operands):
            lines.append(f"  {'operands' if k == 0 else '':<9} {operand}")
        if self.branch:
            lines.append(f"  {'branch':<9} {self.branch}")
        for fix in self.fixes:
            forgets = "  # forgets what the types knew" if fix.forgets else ""
            lines.append(f"  {'fix':<9} {fix.call}{forgets}")
            lines.append(f"  {'':<9} forward: {fix.forward}; backward: {fix.backward}")
        if self.advice:
            lines.append(f"  {'fix':<9} {self.advice}")
        return "\n".join(lines)

    def after(self, branch: str) -> None:
        """Say after which branch it is, on a number that belongs to an axis."""
        self.branch = branch
        self.args = (self._text(),)


class MisfitError(AssertionError):
    """The package inferred a type that its result does not have: a mistake of ours."""


class UncheckedWarning(UserWarning):
    """A block ended in which placements could not be checked, because there was no mesh.

    `warnings.simplefilter("error", UncheckedWarning)` makes it an error.
    """


class BranchWarning(UserWarning):
    """Ranks took different branches on a number that belongs to an axis.

    Types do not follow branches. `warnings.simplefilter("error", BranchWarning)` makes it
    an error, "ignore" silences it.
    """


class NotWaitedWarning(UserWarning):
    """A collective was started and its result was never waited for.

    `warnings.simplefilter("error", NotWaitedWarning)` makes it an error where Python lets
    it: at the end of `verify()`, and a message on stderr where the result was dropped.
    """


class Support(TypedDict, total=False):
    """What may stand below the first line of a message."""

    rule: str
    operands: Sequence[str]
    fixes: Sequence[Fix]
    advice: str
    branch: str


class Details(Support, total=False):
    """The fields of a PlacementError apart from its first line and its place."""

    name: str
    axis: str | None
    expected: str
    actual: str


def refused(where: str, problem: str, **details: Unpack[Details]) -> PlacementError:
    """`where: problem`, and the details below."""
    frame = outermost_frame(dtensors.API, dtensors.CALLS)
    if frame is not None:
        call, instead = dtensors.dtensor_call(frame)
        where = located(call)
        problem = "a block checks local tensors that have types, and takes no DTensors"
        details = Details(rule="a DTensor hides its collectives", advice=instead)
    return PlacementError(f"{where}: {problem}", where=where, **details)


def refused_call(call: str, problem: str, **details: Unpack[Details]) -> PlacementError:
    """`call at file:line: problem`: the error for a call that the user's code makes."""
    return refused(located(call), problem, **details)


def mismatch(
    where: str,
    name: str,
    axis: str | None,
    expected: str,
    actual: str,
    **support: Unpack[Support],
) -> PlacementError:
    """`where: name is actual on axis 'axis', expected expected`."""
    on_axis = f" on axis {axis!r}" if axis else ""
    problem = f"{name} is {actual}{on_axis}, expected {expected}"
    return refused(
        where, problem, name=name, axis=axis, expected=expected, actual=actual, **support
    )


def wrong_type(
    call: str,
    x: Tensor,
    known: TensorType,
    axis: str | None,
    expected: str,
    actual: str,
    *,
    unnamed: str = "x",
    **support: Unpack[Support],
) -> PlacementError:
    """Return the mismatch of the tensor `x` of type `known` in a call of the user's code.

    `unnamed` is what to call the tensor if the user's code has no name for it.
    """
    name = name_of(x, call) or unnamed
    operands: Support = {"operands": [described(x, known, name_of(x, call))]}
    return mismatch(located(call), name, axis, expected, actual, **{**operands, **support})


def type_or_error(x: Tensor, call: str) -> TensorType:
    """Return the type of a tensor; PlacementError if it has none.

    On one device every tensor has the empty type.
    """
    known = tags.get(x)
    if known is None:
        mesh = checked_mesh()
        if not mesh.axes:
            return TensorType(mesh, ())
        raise untyped(call, x)
    if known.fresh is None:
        return known
    known = up_to_date(x)
    if known is None:
        raise overwritten(call, x)
    return known


def transformed(call: str, what: str, name: str) -> PlacementError:
    """Return the error for what a transform does, which the checker does not follow."""
    return refused_call(
        call,
        f"{what} inside a transform of torch.func (vmap, grad, jvp) or of forward mode",
        name=name,
        rule="a transform hands its function other tensors than those that have types",
        advice="wrap the transformed function in placements.region(fn, ins=..., "
        "outs=..., grads=...), or call it with checking off",
    )


def untyped(call: str, x: Tensor) -> PlacementError:
    """Return the error for a tensor without a type."""
    name = name_of(x, call) or "the tensor"
    if in_transform():
        return transformed(call, f"{name} has no placement", name)
    if dtensors.types_of_placements(x) is not None:
        return held_as_dtensor(call, x)
    axes = ", ".join(f"{axis!r}: ..." for axis in checked_mesh().axes)
    advice = f"{name} = assert_type({name}, {{{axes}}})"
    if isinstance(x, nn.Parameter):
        module, own = _of_module(name)
        advice = f"declare({module}, {{{own!r}: {{{axes}}}}}), and call the module"
    return refused_call(
        call,
        f"{name} has no placement",
        name=name,
        rule="every tensor says what it is on each mesh axis",
        operands=[described(x, None, name_of(x, call))],
        advice=advice,
    )


def _of_module(name: str) -> tuple[str, str]:
    """Return the module of a parameter as the code calls it, and the name there."""
    module, dot, own = name.partition(".")
    if not dot:
        return "module", "its name"
    return module, re.sub(r"\[(\w+)\]", r".\1", own)  # layers[0].w is layers.0.w there


def held_as_dtensor(call: str, x: Tensor) -> PlacementError:
    """Return the error for a DTensor as an operand, such as a parameter that is one."""
    name = name_of(x, call) or "the tensor"
    types = dtensors.types_of_placements(x)
    advice = f"the local tensor, declared as {types!r}"
    if isinstance(x, nn.Parameter):
        module, own = _of_module(name)
        advice = (
            f"make it of the whole plain tensor, and hold_pieces({module}, "
            f"{{{own!r}: {types!r}}}), which keeps this rank's piece (I in the place of R "
            "where all ranks repeat the same); an optimizer steps outside of the block"
        )
    return refused_call(
        call,
        f"{name} is a DTensor; a block checks local tensors that have types",
        name=name,
        rule="a DTensor hides its collectives",
        advice=advice,
    )


def overwritten(call: str, x: Tensor) -> PlacementError:
    """Return the error for a factory's tensor that was written through a view of it."""
    name = name_of(x) or "the tensor"
    return refused_call(
        call,
        f"{name} was filled by a factory and then written through another name for its "
        "memory, so its type is not known",
        name=name,
        rule="a write through a view does not tell the tensor below it",
        operands=[described(x)],
        advice="write through the tensor itself, not through a view of it",
    )


def padded_at(
    call: str,
    x: Tensor,
    known: TensorType,
    rule: str = "rows of padding would be taken for valid rows",
) -> PlacementError:
    """Return the error for a place that takes no rows of padding."""
    return wrong_type(
        call, x, known, None, "no rows of padding",
        print_pads(known.pads).removeprefix(", "),
        rule=rule,
        advice="leave them out: x[valid], or x[:n] after pad_rows",
    )  # fmt: skip
