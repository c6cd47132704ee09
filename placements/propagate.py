"""The torch-function mode: read the operands' types, infer, tag the results.

Inference runs before the op, so that a refused op changes nothing. Its result is kept by
operand types, shapes and other arguments; the keys hold no tensors.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor
from torch.overrides import TorchFunctionMode

from placements import tags
from placements.callsite import caller, name_of
from placements.describe import (
    NO_MESH,
    checked_mesh,
    described,
    dtype_name,
    type_or_error,
)
from placements.errors import PlacementError, mismatch
from placements.guards import doors_watched
from placements.infer import SHAPES, Operand, Refusal
from placements.mesh import Mesh, current_mesh
from placements.op_lookup import KNOWN, Call, resolve
from placements.ops import Op
from placements.state import Observer, checkers, current
from placements.suggest import fixes
from placements.tensor_type import TensorType
from placements.types import WORDS, Shard

_MEMO_SIZE = 2048

get_type = tags.get  # looked up once: this is the hot path


class Typecheck(TorchFunctionMode):
    """Infer and check the type of every tensor that an op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.lenient = False  # inside a region: what is not known stays untyped
        self.observer: Observer | None = None
        self._mesh: Mesh | None = None
        self._memo = NO_MESH.inferred

    def __enter__(self) -> "Typecheck":
        self._outer = current.mode
        if self._outer is not None and self.observer is None:
            self.observer = self._outer.observer
        self._doors = doors_watched()
        self._doors.__enter__()
        checkers.count += 1
        current.mode = self
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # pyright: ignore[reportUnknownMemberType]
        current.mode = self._outer
        checkers.count -= 1
        self._doors.__exit__(*exception)

    @contextmanager
    def trusting(self) -> Generator[None]:
        """Let what is not known pass, untyped, until the block ends: a region."""
        before, self.lenient = self.lenient, True
        try:
            yield
        finally:
            self.lenient = before

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        known = KNOWN.get(func)
        if known is None:
            known = resolve(func)
        if known.__class__ is not Call:
            return known(self, func, args, kwargs or {})
        mesh = current_mesh()
        if mesh is not self._mesh:
            self._mesh = mesh
            self._memo = (mesh or NO_MESH).inferred
        stale = False
        key: list[Any] = [known]
        for arg in args:
            if isinstance(arg, Tensor):
                tag = get_type(arg)
                key += (tag, arg.shape, arg.dtype)
                if tag is not None and tag.fresh is not None:
                    stale = stale or tags.is_overwritten(arg)
            else:
                key.append(_key(arg))
        if kwargs:
            for name, arg in kwargs.items():
                key += (name, _key(arg))
        if known.takes_shared:
            key.append(current.shared_axes)
        hashed = tuple(key)
        found = self._memo.get(hashed)
        if found is None or stale:
            found = self._infer(known, func, args, kwargs or {})
            if found is not _UNTYPED:
                if len(self._memo) >= _MEMO_SIZE:
                    self._memo.clear()
                self._memo[hashed] = found
        result = func(*args, **kwargs) if kwargs else func(*args)
        if found.__class__ is TensorType and isinstance(result, Tensor):
            tags.put(result, found)
        elif found is not _UNTYPED:
            _tag(args[0] if known.in_place and args else result, found)
        return result

    def _infer(
        self,
        call: Call,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        tensors = _tensors_in((args, kwargs))
        where = call.op.name
        if call.in_place and not where.endswith("_"):
            where += "_"
        if kwargs.get("out") is not None:
            raise PlacementError(
                f"{where} at {caller()}: out= would change a tensor behind its type",
                where=where,
                rule="other names for the same memory would not know",
                advice="use the result",
            )
        if call.in_place and call.op.group in _OVERWRITES and tags.get(tensors[0]) is None:
            return _UNTYPED  # a tensor that is being initialised, not yet declared
        if self.lenient and any(tags.get(t) is None for t in tensors):
            return _UNTYPED
        operands = [
            Operand(type_or_error(t, where), tuple(t.shape), dtype_name(t), k)
            for k, t in enumerate(tensors)
        ]
        named = {_ALIASES.get(name, name): value for name, value in kwargs.items()}
        infer = _inference(call, where, args, named)
        try:
            found = infer(operands)
        except Refusal as refusal:
            if refusal.kind == SHAPES:
                func(*args, **kwargs)  # torch says better what is wrong
            kept = 1 if call.in_place else 0
            raise _refused(where, infer, refusal, tensors, operands, kept) from None
        except (
            TypeError,
            LookupError,
            ArithmeticError,
            AttributeError,
            ValueError,
        ) as error:
            func(*args, **kwargs)  # torch says better what is wrong with its arguments
            raise PlacementError(
                f"{where} at {caller()}: called in a form that the table does not know: "
                f"{error}",
                where=where,
                advice="pass the arguments as the torch documentation names them",
            ) from None
        return found


# Other names that torch takes for an argument.
_ALIASES = {"axis": "dim", "keepdims": "keepdim", "x2": "other"}

# A result that stays without a type.
_UNTYPED = object()

# In-place ops that replace all values, so that what was there does not matter.
_OVERWRITES = ("random", "copies and casts")


def _key(arg: Any) -> Any:
    """What inference sees of an argument, hashable."""
    if isinstance(arg, Tensor):
        if tags.is_overwritten(arg):
            type_or_error(arg, "an op")
        return tags.get(arg), arg.shape, arg.dtype
    if isinstance(arg, list | tuple):
        return tuple(map(_key, cast(Any, arg)))
    if isinstance(arg, slice):
        bounds = cast(Any, arg)
        return "slice", _key(bounds.start), _key(bounds.stop), _key(bounds.step)
    if arg.__hash__ is None:
        return arg.__class__, id(arg)
    if isinstance(arg, float):
        return float, not arg  # of a number only this matters to types
    return arg.__class__, arg


def _tensors_in(value: Any) -> list[Tensor]:
    """The tensors among arguments, in order of appearance."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(cast(Any, value).values())
    if isinstance(value, list | tuple):
        return [t for item in cast(Any, value) for t in _tensors_in(item)]
    return []


def _inference(
    call: Call, where: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Sequence[Operand]], Any]:
    """The op's flow as a function of its operands, other arguments given."""
    extra: dict[str, Any] = {}
    first: tuple[Any, ...] = (checked_mesh(),) if call.takes_mesh else ()
    if call.takes_shared:
        extra["shared"] = current.shared_axes

    def infer(operands: Sequence[Operand]) -> Any:
        left = iter(operands)
        seen = tuple(_with_operands(a, left) for a in args)
        named = {k: _with_operands(a, left) for k, a in kwargs.items()}
        found = call.op.flow(call.op, *first, *seen, **named, **extra)
        if call.in_place or _asks_in_place(call.op, args, kwargs):
            return _written(where, operands[0], found)
        return found

    return infer


def _asks_in_place(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """relu(x, inplace=True), relu(x, True), dropout(x, 0.5, True, True)."""
    if kwargs.get("inplace", False):
        return True
    # Activations take the flag second, dropout fourth; it is their only flag there.
    return (
        op.group in ("elementwise", "random") and len(args) in (2, 4) and args[-1] is True
    )


def _with_operands(arg: Any, operands: Any) -> Any:
    if isinstance(arg, Tensor):
        return next(operands)
    if isinstance(arg, list | tuple):
        items = cast(Any, arg)
        seen = [_with_operands(a, operands) for a in items]
        return seen if isinstance(arg, list) else tuple(seen)
    return arg


def _written(where: str, target: Operand, found: TensorType) -> TensorType:
    """An in-place op keeps the type of what it writes, unless it is fresh."""
    old = target.type
    if old.fresh is not None:
        return found
    if old.types == found.types and old.orders == found.orders:
        return found
    axis = next((a for a in old if old[a] != found[a]), None)
    raise Refusal(
        f"an in-place op cannot change a type, here to {found!r}: other names for the "
        "same memory would not know",
        axis,
        target,
        repr(found[axis]) if axis else repr(found),
    )


def _refused(
    where: str,
    infer: Callable[[Sequence[Operand]], Any],
    refusal: Refusal,
    tensors: Sequence[Tensor],
    operands: Sequence[Operand],
    kept: int,
) -> PlacementError:
    """The error for a refused op; the first `kept` operands are written, not to change."""
    names = [name_of(t) or f"argument {k}" for k, t in enumerate(tensors)]
    guilty = refusal.operand.position if refusal.operand else 0
    actual = "refused"
    if tensors:
        found = operands[guilty].type
        actual = repr(found)
        if refusal.axis is not None and refusal.axis in found:
            t = found[refusal.axis]
            actual = repr(t) if isinstance(t, Shard) else WORDS[t.letter]
        elif refusal.index is not None:
            actual = f"an index ({found.index!r})"
    offered = fixes(infer, operands, names, refusal, kept)
    return mismatch(
        f"{where} at {caller()}",
        names[guilty] if names else where,
        refusal.axis,
        refusal.expected or "another type",
        actual,
        rule=refusal.reason,
        operands=[described(t, o.type) for t, o in zip(tensors, operands, strict=True)],
        fixes=offered,
    )


def _tag(result: Any, found: Any) -> None:
    """Tag a tensor, or each of several; a list of types is repeated as needed."""
    several = isinstance(found, list | tuple)
    results = [result] if isinstance(result, Tensor) else result
    if not isinstance(results, list | tuple):
        return
    types = cast(Any, found if several else [found])
    tensors = cast(Any, results)
    for k, tensor in enumerate(t for t in tensors if isinstance(t, Tensor)):
        tags.put(tensor, types[min(k, len(types) - 1)])


@contextmanager
def typecheck() -> Generator[Typecheck]:
    """Check every op inside the `with` block; a block inside another changes nothing."""
    if current.mode is not None:
        yield current.mode
        return
    with Typecheck() as mode:
        yield mode
