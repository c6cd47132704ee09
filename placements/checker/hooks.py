"""Hooks of the user's on gradients: what they make of a gradient must have its type.

A hook runs in backward, where checking is suspended. Here its ops are checked again, and it
begins with a gradient of the type that the value demands. A hook may look at anything: what
a refused op gives has no type, and is no gradient. An error is raised only for a gradient
that a hook returns, assigns or writes, and that does not have the type of the gradient.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import BackwardHook

from placements._torch import hooks_of, leaf_of, unseen
from placements.checker.call import tensors_in
from placements.inference.combine import as_numbers
from placements.inference.presentations import presented
from placements.inference.terms import Refusal
from placements.runtime import tags
from placements.runtime.callsite import is_library
from placements.runtime.errors import PlacementError, mismatch, refused
from placements.runtime.gradient_notes import note_of
from placements.runtime.gradient_watch import after_a_sum
from placements.runtime.mesh import current_mesh, set_current_mesh
from placements.runtime.state import Checker, current, suspended
from placements.types.tensor import ZERO, TensorType, from_factory

_RULE = "the gradient of a value has the dual of its type, whoever computes it"

Hook = Callable[..., Any]


class _Looking(TorchFunctionMode):
    """Lets refused ops run without a type, unless they write a tensor that has one."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals: list[PlacementError] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given: dict[str, Any] = kwargs or {}
        tensors = list(tensors_in((args, given)))
        typed = [t for t in tensors if tags.get(t) is not None]
        untyped = [t for t in tensors if tags.get(t) is None]
        # A write of what a collective made of the gradient is seen by who reads the note.
        is_noted = bool(untyped) and all(_noted(t) is not None for t in untyped)
        before = _writes(typed)
        try:
            result = func(*args, **given)
        except PlacementError as refusal:
            with unseen():
                result = func(*args, **given)
            if _writes(typed) != before and not is_noted:
                raise refusal from None
            self.refusals.append(refusal)
        else:
            if untyped and not is_noted and _writes(typed) != before:
                raise refused(
                    "a hook",
                    "it writes what has no type into a tensor that has one",
                    rule=_RULE,
                ) from next(iter(self.refusals), None)
        return result


def _writes(tensors: Sequence[Tensor]) -> list[int]:
    with unseen():
        return [tags.writes_of(tensor) for tensor in tensors]


@contextmanager
def _looking(mode: Checker, known: TensorType) -> Generator[_Looking]:
    """Check the ops of a hook, on the mesh of its tensor if there is no other."""
    with set_current_mesh(current_mesh() or known.mesh), mode.afresh() as own:
        with own.trusting(), _Looking() as looking:
            yield looking


@contextmanager
def _typed(of: Sequence[tuple[Tensor, TensorType]]) -> Generator[None]:
    """Give gradients the dual types of what they are the gradients of."""
    before = [tags.get(grad) for grad, _ in of]
    try:
        for grad, known in of:
            if note_of(grad) is None:
                tags.put(grad, known.dual())
        yield
    finally:
        for (grad, _), own in zip(of, before, strict=True):
            if own is None:
                tags.clear(grad)
            else:
                tags.put(grad, own)


def _checked(hook: Hook, mode: Checker, known: TensorType, grad: Tensor) -> Any:
    """Call a hook of a tensor of type `known` with the gradient of the tensor."""
    if not current.in_backward:
        return hook(grad)
    with _looking(mode, known) as looking, _typed([(grad, known)]):
        found = hook(grad)
        if isinstance(found, Tensor) and found is not grad:
            _check(hook, "returns", known.dual(), found, looking)
    return found


# Types of the tensors among the arguments or the results of a module, by position.
_Ends = dict[int, TensorType]


def _checked_ends(
    hook: Hook, mode: Checker, ends: Sequence[_Ends], module: Any, *grads: Any
) -> Any:
    """Call a hook of a module; what it returns stands for the first of `grads`."""
    typed = [
        (grad, types[k])
        for types, group in zip(ends, grads, strict=True)
        for k, grad in enumerate(group)
        if isinstance(grad, Tensor) and k in types
    ]
    if not current.in_backward or not typed:
        return hook(module, *grads)
    with _looking(mode, typed[0][1]) as looking, _typed(typed):
        found: Any = hook(module, *grads)
        for k, grad in enumerate(_several(found)):
            if isinstance(grad, Tensor) and grad is not grads[0][k] and k in ends[0]:
                _check(hook, "returns", ends[0][k].dual(), grad, looking)
    return found


def _several(value: Any) -> Sequence[Any]:
    return cast(Any, value) if isinstance(value, tuple | list) else (value,)


class CheckedModuleHooks(BackwardHook):
    """Calls the hooks of a module in backward, and checks what they return."""

    def __init__(self, module: Any, hooks: Sequence[Hook], before: Sequence[Hook]) -> None:
        self._inputs, self._outputs = _Ends(), _Ends()
        super().__init__(
            module,
            [self._checked(hook, self._inputs, self._outputs) for hook in hooks],
            [self._checked(hook, self._outputs) for hook in before],
        )

    def _checked(self, hook: Hook, *ends: _Ends) -> Hook:
        mode = current.mode
        if mode is None or not _is_users(hook):
            return hook
        return partial(_checked_ends, hook, mode, ends)

    def setup_input_hook(self, args: Any) -> Any:
        self._inputs.update(_types_of(args))
        return cast(Any, super()).setup_input_hook(args)

    def setup_output_hook(self, args: Any) -> Any:
        self._outputs.update(_types_of(_several(args)))
        return cast(Any, super()).setup_output_hook(args)


def _types_of(values: Sequence[Any]) -> Iterator[tuple[int, TensorType]]:
    for k, value in enumerate(values):
        known = tags.get(value) if isinstance(value, Tensor) else None
        if known is not None:
            yield k, known


def _noted(tensor: Tensor) -> TensorType | None:
    """Return what a gradient was before typed collectives of hooks changed it."""
    note = note_of(tensor)
    return None if note is None else note.of


def _checked_after(hook: Hook, mode: Checker, known: TensorType, leaf: Tensor) -> Any:
    """Call a hook that runs when the gradient of a leaf is complete."""
    if not current.in_backward:
        return hook(leaf)
    with unseen():
        before = leaf.grad
    with _looking(mode, known) as looking:
        found = hook(leaf)
        with unseen():
            after = leaf.grad
        if after is not None and after is not before:
            _check(hook, "assigns", known.dual(), after, looking)
    return found


def _check(
    hook: Hook, does: str, wanted: TensorType, found: Tensor, looking: _Looking
) -> None:
    where = f"backward: the hook at {_place(hook)}"
    # What a typed collective made has a note. Whoever uses the gradient reads the note.
    actual = tags.get(found) or _noted(found)
    if actual is None:
        summed = after_a_sum()
        if summed is not None and note_of(found) is None:
            raise summed
        cause = next(iter(looking.refusals), None)
        raise refused(
            where,
            f"it {does} a gradient that has no type",
            axis=None if cause is None else cause.axis,
            expected=repr(wanted),
            actual="no type",
            rule=_RULE if cause is None else f"{_RULE}; {cause.headline}",
        ) from cause
    actual = as_numbers(actual)
    if actual.is_number and actual.fresh is not None:
        actual = from_factory(wanted.mesh, actual.fresh)
    try:
        shown = actual if actual.mesh == wanted.mesh else presented(actual, wanted.mesh)
    except Refusal as refusal:
        raise refused(
            where, f"it {does} a gradient on {actual.mesh!r}: {refusal.reason}", rule=_RULE
        ) from None
    for axis, t in wanted.items():
        fits = shown.is_number and (t.letter != "P" or shown.fresh == ZERO)
        if shown[axis] != t and not fits:
            raise mismatch(
                where, f"the gradient that it {does}", axis, repr(t), repr(shown[axis]),
                rule=_RULE,
            )  # fmt: skip


def _code(hook: Hook) -> Any:
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)


def _place(hook: Hook) -> str:
    code = _code(hook)
    return "?" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def _is_users(hook: Hook) -> bool:
    code = _code(hook)
    return code is None or not is_library(code.co_filename)


def register_hook(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """x.register_hook(hook): the hook of an op's result is checked when it runs."""
    x, *rest = args
    hook = rest[0] if rest else kwargs.get("hook")
    known = tags.get(x)
    if known is None or x.grad_fn is None or hook is None or not _is_users(hook):
        return func(*args, **kwargs)  # the hooks of leaves are found when backward begins
    return func(x, partial(_checked, hook, mode, known))


@contextmanager
def in_backward(mode: Checker, outputs: Sequence[Tensor]) -> Generator[None]:
    """Suspend checking while backward runs from these tensors, but for hooks."""
    replaced: list[tuple[dict[int, Hook], int, Hook, Hook]] = []
    with unseen():
        for leaf in _leaves(outputs):
            known = tags.get(leaf)
            for hooks, checked in zip(
                hooks_of(leaf), (_checked, _checked_after), strict=True
            ):
                for key, hook in hooks.items():
                    if known is not None and _is_users(hook):
                        own = partial(checked, hook, mode, known)
                        replaced.append((hooks, key, hook, own))
    try:
        for hooks, key, _, own in replaced:
            hooks[key] = own
        with suspended(in_backward=True):
            yield
    finally:
        for hooks, key, hook, own in replaced:
            if hooks.get(key) is own:  # else the hook was removed meanwhile
                hooks[key] = hook


def _leaves(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield every leaf that backward from these tensors reaches."""
    yield from (t for t in outputs if t.grad_fn is None)
    left: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(left)
    while left:
        node = left.pop()
        leaf = leaf_of(node)
        if leaf is not None:
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)
