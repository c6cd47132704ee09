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
from placements.autograd_rules import AUTOGRAD, gradient_of
from placements.callsite import caller, name_of
from placements.describe import (
    NO_MESH,
    checked_mesh,
    described,
    dtype_name,
    type_or_error,
)
from placements.errors import PlacementError, mismatch
from placements.guards import doors_watched, raw_collective
from placements.infer import SHAPES, Operand, Refusal
from placements.mesh import Mesh, current_mesh
from placements.ops import METADATA, OPS, READS, SOURCES, Op
from placements.state import Observer, checkers, current
from placements.suggest import fixes
from placements.tensor_type import TensorType
from placements.torch_private import op_name
from placements.types import WORDS, Shard

_MEMO_SIZE = 2048

get_type = tags.get  # looked up once: this is the hot path


class Call:
    """A known op, and whether this form of it writes its first argument."""

    __slots__ = ("in_place", "op", "takes_mesh", "takes_shared")

    def __init__(self, op: Op, in_place: bool) -> None:
        self.op = op
        self.in_place = in_place
        self.takes_mesh = "mesh" in op.takes
        self.takes_shared = "shared" in op.takes


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
        known = _known.get(func)
        if known is None:
            known = _resolve(func)
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
            _tag(args[0] if known.in_place else result, found)
        return result

    def _infer(
        self,
        call: Call,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        tensors = _tensors_in((args, kwargs))
        where = call.op.name + "_" * call.in_place
        if call.in_place and call.op.group in _OVERWRITES and tags.get(args[0]) is None:
            return _UNTYPED  # a tensor that is being initialised, not yet declared
        if self.lenient and any(tags.get(t) is None for t in tensors):
            return _UNTYPED
        operands = [
            Operand(type_or_error(t, where), tuple(t.shape), dtype_name(t), k)
            for k, t in enumerate(tensors)
        ]
        infer = _inference(call, where, args, kwargs)
        try:
            found = infer(operands)
        except Refusal as refusal:
            if refusal.kind == SHAPES:
                func(*args, **kwargs)  # torch says better what is wrong
            raise _refused(where, infer, refusal, tensors, operands) from None
        except TypeError as error:
            raise PlacementError(
                f"{where} at {caller()}: called in a form that the table does not know: "
                f"{error}",
                where=where,
                advice="pass the arguments as the torch documentation names them",
            ) from None
        return found


# A result that stays without a type.
_UNTYPED = object()

# In-place ops that replace all values, so that what was there does not matter.
_OVERWRITES = ("random", "copies and casts")

_known: dict[Any, Any] = {}


def _key(arg: Any) -> Any:
    """What inference sees of an argument, hashable."""
    if isinstance(arg, Tensor):
        return tags.get(arg), arg.shape, arg.dtype
    if isinstance(arg, list | tuple):
        return tuple(map(_key, cast(Any, arg)))
    if isinstance(arg, slice):
        bounds = cast(Any, arg)
        return "slice", bounds.start, bounds.stop, bounds.step
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
        if call.in_place:
            return _written(where, seen[0], found)
        return found

    return infer


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
) -> PlacementError:
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
    offered = fixes(infer, operands, names, refusal)
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


def _resolve(func: Any) -> Any:
    """Find out once what to do with a torch function, and remember it."""
    known = _find(func)
    _known[func] = known
    return known


def _find(func: Any) -> Any:
    name = torch_name(func)
    if name == "grad" and getattr(func, "__name__", "") == "__get__":
        return gradient_of
    if name in AUTOGRAD:
        return AUTOGRAD[name]
    if name in METADATA or name in SOURCES or name.endswith(".__set__"):
        return _pass
    if name in READS:
        return _read
    if name in OPS:
        return Call(OPS[name], in_place=name == "__setitem__")
    base = name[:-1] if name.endswith("_") and not name.endswith("__") else ""
    if base in OPS:
        return Call(OPS[base], in_place=True)
    return _unknown


def torch_name(func: Any) -> str:
    """The name that the table knows an op by."""
    qualified = op_name(func)
    if qualified is not None:
        return qualified.removeprefix("aten::")
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):
        owner = func.__self__.__name__
        return owner if name == "__get__" else f"{owner}.__set__"
    return name


def _pass(mode: Typecheck, func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _read(mode: Typecheck, func: Any, args: Any, kwargs: Any) -> Any:
    """A value becomes a Python number: not while it is pending a sum."""
    for tensor in args:
        known = tags.get(tensor) if isinstance(tensor, Tensor) else None
        for axis in known or ():
            if known is not None and known[axis].letter == "P":
                where, name = (
                    f"{torch_name(func)} at {caller()}",
                    name_of(tensor) or "x",
                )
                raise mismatch(
                    where, name, axis, "Replicate", "Partial",
                    rule="this rank holds one summand, not the value",
                    operands=[described(tensor)],
                    advice=f"all_reduce({name}, {axis!r}, src=P, dst=R)",
                )  # fmt: skip
    return func(*args, **kwargs)


def _unknown(mode: Typecheck, func: Any, args: Any, kwargs: Any) -> Any:
    if mode.lenient:
        return func(*args, **kwargs)
    name = torch_name(func)
    module = str(getattr(func, "__module__", ""))
    if name.startswith(("_c10d_functional", "c10d")) or module.startswith(
        "torch.distributed"
    ):
        raise raw_collective(name.rpartition("::")[2])
    raise PlacementError(
        f"{name} at {caller()}: the table of ops does not know it",
        where=name,
        name=name,
        rule="an op that is not known could do anything to placements",
        operands=[described(t) for t in args if isinstance(t, Tensor)],
        advice=f"placements.register_op({name!r}, like='exp')  "
        "# the known op that treats its operands alike",
    )


def register_op(name: str, like: str) -> None:
    """Make an op known that treats its operands as a known one does.

    `name` is the torch name, or `namespace::name` of a custom op.
    """
    if like not in OPS:
        raise ValueError(f"like={like!r} is not in the table of ops")
    if name in OPS:
        raise ValueError(f"{name!r} is in the table of ops already")
    OPS[name] = OPS[like]
    _known.clear()


@contextmanager
def typecheck() -> Generator[Typecheck]:
    """Check every op inside the `with` block; a block inside another changes nothing."""
    if current.mode is not None:
        yield current.mode
        return
    with Typecheck() as mode:
        yield mode
