"""`autograd.Function`s: what they say of themselves, or what both of their halves do.

A Function hides a backward. If it has a `placement_rule`, that rule is taken at its word.
If it has none, the ops of its forward are checked as if they stood in the program, and so
are the ops of its backward, when that runs: they begin with gradients of the types that the
results demand, and must end with the types that the arguments demand.

What a kernel computes is not seen by any mode. A kernel needs memory to write to, so a
Function without a rule that allocates memory is refused, and so is one whose result has no
type, or is an argument that it wrote.
"""

from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from placements._torch import HANDS_THROUGH, unseen
from placements.checker.backward import check_gradient
from placements.checker.guards import raw_collective, typed_call
from placements.checker.lookup import KNOWN, Call, resolve
from placements.checker.writes import reading_only
from placements.runtime import tags
from placements.runtime.declared import declared
from placements.runtime.errors import PlacementError, padded_at, refused_call
from placements.runtime.mesh import checked_mesh, set_current_mesh
from placements.runtime.state import Checker, current, observer, suspended
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType

# Functions of torch whose backward is the backward of the checked ops inside them.
TRANSPARENT = frozenset({"CheckpointFunction"})

# Start of the names that torch gives the Function inside a custom op: the op itself is in
# the table, or it would have been refused.
OF_A_CUSTOM_OP = "GeneratedBackwardFor_"


def checked_function(apply: Any) -> Any:
    """Return a `Function.apply` that asks what the Function does to placements.

    torch 2.13 has a classmethod there, torch 2.14 and later a C method; both bind to a
    class.
    """

    def checked(cls: Any, *args: Any, **kwargs: Any) -> Any:
        original = apply.__get__(None, cls)
        mode = current.mode
        if mode is None or mode.lenient or _is_transparent(cls):
            return original(*args, **kwargs)
        return _checked_apply(apply, mode, cls, args, kwargs)

    return classmethod(checked)


def _is_transparent(cls: Any) -> bool:
    return cls.__name__ in TRANSPARENT or cls.__name__.startswith(OF_A_CUSTOM_OP)


def _checked_apply(apply: Any, mode: Checker, cls: Any, args: Any, kwargs: Any) -> Any:
    rule = getattr(cls, "placement_rule", None)
    is_torch = cls.__module__.startswith("torch.distributed")
    if rule is None and is_torch and typed_call(cls.__name__) is not None:
        raise raw_collective(cls.__name__)
    if is_torch and cls.__name__ == HANDS_THROUGH:
        return _handed_through(apply, cls, args)
    types = [tags.get(a) if isinstance(a, Tensor) else a for a in args]
    for arg, known in zip(args, types, strict=True):
        if isinstance(known, TensorType) and known.pads:
            raise padded_at(f"{cls.__name__}.apply", arg, known)
    if rule is None:
        return _apply_checked(apply, mode, cls, args, kwargs)
    found = rule(*types)
    with reading_only(f"{cls.__name__}.apply", args) as returned:
        with suspended(), unseen():
            result: Any = apply.__get__(None, cls)(*args, **kwargs)
        returned.extend(_tag_results(cls, result, found))
    return result


def _handed_through(apply: Any, cls: Any, args: Any) -> Any:
    """Call a Function of torch that returns its tensors as they are, and types them so."""
    with suspended(), unseen():
        result: Any = apply.__get__(None, cls)(*args)
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    for tensor, arg in zip(_as_tuple(result), tensors, strict=True):
        known = tags.get(arg)
        if known is not None:
            tags.put(tensor, known)
    return result


class _Noted(NamedTuple):
    """What a backward needs of its forward."""

    mode: Checker
    mesh: Mesh
    arguments: tuple[TensorType | None, ...]
    results: tuple[TensorType | None, ...]


def _apply_checked(apply: Any, mode: Checker, cls: Any, args: Any, kwargs: Any) -> Any:
    where = f"{cls.__name__}.apply"
    arguments = tuple(_type(arg) for arg in args)
    if cls.vjp is not torch.autograd.Function.vjp:
        raise _must_say(cls, "it has a vjp in the place of a backward")
    with reading_only(where, args) as returned:
        result: Any = apply.__get__(None, _with_checked_halves(cls))(*args, **kwargs)
        results = _as_tuple(result)
        for tensor in results:
            if isinstance(tensor, Tensor) and (
                tags.get(tensor) is None or any(tensor is arg for arg in args)
            ):
                raise _must_say(cls, "a result of its forward has no type")
        returned.extend(t for t in results if isinstance(t, Tensor))
    noted = _Noted(mode, checked_mesh(), arguments, tuple(_type(t) for t in results))
    for tensor in results:
        if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
            setattr(tensor.grad_fn, tags.FUNCTION, noted)
    return result


def _type(value: Any) -> TensorType | None:
    return tags.get(value) if isinstance(value, Tensor) else None


@lru_cache(maxsize=256)
def _with_checked_halves(cls: Any) -> Any:
    """Return the Function, with a forward that allocates nothing and a checked backward."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _WithoutFactories(cls):
            return cls.forward(*args, **kwargs)

    def backward(ctx: Any, *grads: Any) -> Any:
        noted: _Noted | None = getattr(ctx, tags.FUNCTION, None)
        if noted is None:
            raise _must_say(cls, "its forward was not checked")
        with set_current_mesh(noted.mesh), noted.mode.afresh():
            typed = [_typed(grad, t) for grad, t in zip(grads, noted.results, strict=True)]
            with _WithoutFactories(cls):
                found = cls.backward(ctx, *typed)
            for grad, known in zip(_as_tuple(found), noted.arguments, strict=False):
                if isinstance(grad, Tensor) and known is not None:
                    check_gradient(f"{cls.__name__}.backward", known, grad)
        with unseen():  # gradients that flow on have no types of their own
            back = [_alias(grad) for grad in _as_tuple(found)]
        return tuple(back) if isinstance(found, tuple) else back[0]

    halves = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(cls.__name__, (cls,), {**halves, "__module__": cls.__module__})


def _alias(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, Tensor) else value


def _typed(grad: Any, known: TensorType | None) -> Any:
    """Another name for a gradient, with the type that the result demands."""
    with unseen():
        named = _alias(grad)
        if isinstance(grad, Tensor) and known is not None:
            tags.put(named, known.dual())
    return named


class _WithoutFactories(TorchFunctionMode):
    """Refuses to allocate memory, which a kernel could fill unseen."""

    def __init__(self, cls: Any) -> None:
        super().__init__()
        self._cls = cls

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known = KNOWN.get(func) or resolve(func)
        if known.__class__ is Call and known.takes_mesh:
            raise _must_say(
                self._cls, f"it allocates memory ({known.op.name}), which a kernel may fill"
            )
        return func(*args, **(kwargs or {}))


def _must_say(cls: Any, why: str) -> PlacementError:
    return refused_call(
        f"{cls.__name__}.apply",
        f"this autograd.Function does not say what it does to placements, and {why}",
        name=cls.__name__,
        rule="what is not seen of a Function must be declared",
        advice="give it a staticmethod placement_rule(*types) that returns the type "
        "of the result (tensors' types for tensors, other arguments as they are), "
        "or call it in a region",
    )


def _tag_results(cls: Any, result: Any, found: Any) -> list[Tensor]:
    results, types = _as_tuple(result), _as_tuple(found)
    if len(types) != len(results):
        raise PlacementError(
            f"{cls.__name__}.placement_rule gave {len(types)} types for {len(results)} "
            "results",
            where=f"{cls.__name__}.apply",
        )
    tensors: list[Tensor] = []
    for tensor, said in zip(results, types, strict=True):
        if isinstance(tensor, Tensor):
            is_type = isinstance(said, TensorType)
            shape = tuple(tensor.shape)
            tags.put(tensor, said if is_type else declared(checked_mesh(), said, shape))
            tensors.append(tensor)
            watcher = observer()
            if watcher is not None:
                where = f"{cls.__name__}.apply"
                watcher.crossing(where, "result", tensor, tags.get(tensor))
    return tensors


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return cast(Any, value) if isinstance(value, tuple) else (value,)
