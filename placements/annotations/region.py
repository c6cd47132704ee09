"""`region`: declare the types around a function whose ops are not all known."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from torch import Tensor

from placements._torch import pytree, unseen
from placements.annotations.declarations import check_said, observe
from placements.checker.writes import reading_only
from placements.runtime import tags
from placements.runtime.declared import declared
from placements.runtime.describe import described
from placements.runtime.errors import padded_at, refused, type_or_error, wrong_type
from placements.runtime.mesh import checked_mesh, unknown_axis_here
from placements.runtime.state import current
from placements.types.axis import TypesLike
from placements.types.errors import ArgumentError
from placements.types.text import as_axis_type

T = TypeVar("T")


def region(
    fn: Callable[..., T],
    *,
    ins: Sequence[TypesLike | None],
    outs: TypesLike | Sequence[TypesLike],
    grads: Sequence[TypesLike | None],
) -> Callable[..., T]:
    """Declare the types around an opaque function.

    `ins` and `grads` give, for each positional argument, its type and the type of its
    gradient (None for what is not a tensor): neither has a default, and the gradient's
    type must be the dual of the argument's. Inside, ops that are known are checked with
    the declared types; what is not known gives untyped results. At the end a typed
    result must have the type in `outs`; an untyped one gets it. The arguments are not
    to be written. Keywords are for settings; tensors go by position.
    """
    if len(ins) != len(grads):
        raise ValueError(f"region: {len(ins)} ins but {len(grads)} grads")

    def call(*args: Any, **settings: Any) -> T:
        if current.mode is None:
            if current.other is not None:
                return current.other.region(fn, args, settings, ins, outs)
            return fn(*args, **settings)
        for name, value in settings.items():
            if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
                raise ArgumentError(
                    f"region: {name}= is a tensor, and ins and grads speak of positional "
                    "arguments: pass it by position"
                )
        if len(args) != len(ins):
            raise ArgumentError(f"region: {len(ins)} types declared, {len(args)} arguments")
        with unseen():
            for arg, given, grad in zip(args, ins, grads, strict=True):
                _check_boundary(arg, given, grad)
        with reading_only("region", args), current.mode.trusting():
            result = fn(*args, **settings)
        with unseen():
            _check_results(result, outs)
        return result

    return call


def _check_boundary(arg: Any, given: TypesLike | None, grad: TypesLike | None) -> None:
    if not isinstance(arg, Tensor):
        return
    if given is None or grad is None:
        raise ArgumentError(
            f"region: {described(arg)} is a tensor, so ins and grads must say its types"
        )
    known = type_or_error(arg, "region")
    if known.pads:
        raise padded_at("region", arg, known)
    check_said(arg, known, given)
    wrong = unknown_axis_here(known.mesh, grad)
    if wrong is not None:
        raise ArgumentError(f"region: grads {wrong}")
    observe("region", None, arg)
    for axis, t in known.dual().items():
        said = as_axis_type(grad[axis]) if axis in grad else None
        if said != t:
            raise wrong_type(
                "region", arg, known, axis, repr(t), repr(said), unnamed="argument",
                rule="the gradient of a value has the dual of its type: a gradient that "
                "is already complete belongs to an Invariant value",
            )  # fmt: skip


def _check_results(result: Any, outs: Any) -> None:
    results = cast(Any, result if isinstance(result, tuple) else (result,))
    wanted: Any = (outs,) if isinstance(outs, Mapping) else tuple(outs)
    if len(results) != len(wanted):
        raise refused("region", f"{len(results)} results, but outs declares {len(wanted)}")
    for tensor, types in zip(results, wanted, strict=True):
        if tags.get(tensor) is None:
            tags.put(tensor, declared(checked_mesh(), types, tuple(tensor.shape)))
        else:
            check_said(tensor, type_or_error(tensor, "region"), types)
        observe("region", "result", tensor)
