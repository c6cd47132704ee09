"""The torch-function mode: read the operands' types, infer, tag the results.

Inference runs before the op, so that a refused op changes nothing. Its result is kept by
operand types, shapes and other arguments; the keys hold no tensors.
"""

from types import EllipsisType, NoneType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from placements.checker.block import opened
from placements.checker.call import Call, CallInference, UnknownForm, tensors_in
from placements.checker.lookup import KNOWN, resolve
from placements.checker.numbers import Pieces
from placements.checker.refusals import refuse_pieces, refused_by
from placements.checker.results import into, refuse_bools
from placements.checker.writes import check_write
from placements.inference.numbers import RANK_NUMBERS, plain
from placements.inference.templates import Pattern, pattern_of
from placements.inference.terms import SHAPES, Refusal
from placements.runtime import tags
from placements.runtime.blocks import Block, Steps, block
from placements.runtime.errors import (
    MisfitError,
    PlacementError,
    refused_call,
    type_or_error,
)
from placements.runtime.filled import Below, below, is_behind, tell
from placements.runtime.mesh import NO_MESH, current_mesh, said_meshes
from placements.runtime.state import Checker, Observer, block_here, current
from placements.runtime.unchecked import warned_without_a_mesh
from placements.types.axis import Shard
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType

_MEMO_SIZE = 4096

# Looked up once: this is the hot path.
_type_of = tags.get
_TYPE = tags.TYPE
_block_here = block_here.get
_said_mesh = said_meshes.innermost.get
# What stands for itself in a key, beside its class (True is not 1).
_PLAIN = frozenset({int, bool, str, NoneType, EllipsisType, torch.dtype, torch.device})
# Classes of tensors, which `isinstance` asks their metaclass for.
_TENSORS = frozenset({Tensor, nn.Parameter})
_is_all_int = frozenset({int}).issuperset
_is_all_bound = frozenset({int, NoneType}).issuperset


class Typecheck(Block["Typecheck"], TorchFunctionMode):
    """Infer and check the type of every tensor that an op makes, inside `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.lenient = False  # inside a region: what is not known stays untyped
        self.observer: Observer | None = None
        self._mesh: Mesh | None = None
        self._memo = NO_MESH.inferred

    def steps(self) -> "Steps[Typecheck]":
        outer = current.mode
        if outer is not None and self.observer is None:
            self.observer = outer.observer
        yield from opened(self)

    def afresh(self) -> "Typecheck":
        """A block that checks where this one is suspended, as in backward."""
        return Typecheck()

    @block
    def trusting(self) -> Steps[None]:
        """Let what is not known pass, untyped, until the block ends: a region."""
        before = self.lenient
        try:
            self.lenient = True
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
        here = _block_here()
        if here is None or here.mode is not self or not here.is_open:
            if current.mode is not self:  # a task that is in no block, or in another one
                return func(*args, **(kwargs or {}))
        known = KNOWN.get(func)
        if known is None:
            known = resolve(func)
        if known.__class__ is not Call:
            return known(self, func, args, kwargs or {})
        if kwargs and kwargs.get("out") is not None:
            return into(self, known, func, args, kwargs)
        scope = _said_mesh()  # as current_mesh, in one step
        mesh = scope.value if scope is not None and scope.is_open else current_mesh()
        if mesh is not self._mesh:
            self._mesh = mesh
            self._memo = (mesh or NO_MESH).inferred
        key: list[Any] = [known]
        for arg in args:
            kind = arg.__class__
            if kind in _TENSORS:
                own = _type_of(arg)
                if own is not None and own.fresh is not None and is_behind(arg):
                    own = type_or_error(arg, known.op.name)
                key += own, arg.shape, arg.dtype
            elif kind in _PLAIN:
                key += kind, arg
            else:
                key.append(_key(arg))
        if kwargs:
            for name, arg in kwargs.items():
                if arg.__class__ in _PLAIN:
                    key += name, arg.__class__, arg
                else:
                    key += name, _key(arg)
        if known.takes_shared:
            key.append(current.shared_axes)
        if known.reads_floats:
            key.append(repr((args[1:], kwargs)))
        hashed = tuple(key)
        found: Any = self._memo.get(hashed)
        is_new = found is None
        if is_new:
            # What is called once has no other sizes. Types that differ in sizes hash alike.
            types_met = tuple([hash(k) for k in hashed if k.__class__ is TensorType])
            again = types_met in known.met
            known.met.add(types_met)
            pattern = pattern_of(mesh or NO_MESH, hashed) if again else None
            found = None if pattern is None else pattern.known()
            if found is None:
                found = self._infer(known, func, args, kwargs or {}, pattern)
        told: Below | None = None
        written: Tensor | None = None
        if known.in_place or (kwargs and kwargs.get("inplace")):
            written = cast(Tensor, args[0] if args else next(tensors_in(kwargs)))
            after = found if found.__class__ is TensorType else None
            if is_new and after is not None and written.dtype is torch.bool:
                refuse_bools(known.op.name, written, cast(TensorType, after))
            check_write(known.op.name, written, cast(TensorType | None, after))
            told = below(written)
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except (RuntimeError, IndexError, ValueError) as error:
            refuse_pieces(error, known.op.name, (args, kwargs))
            raise
        if written is not None:
            tags.count_write(written)
        if is_new and found is not _UNTYPED:
            check_fit(known.op.name, args[0] if known.in_place and args else result, found)
            self.keep(self._memo, hashed, found)
        if found.__class__ is TensorType and isinstance(result, Tensor):
            if found.fresh is None and _type_of(result) is None:
                setattr(result, _TYPE, found)  # as tags.put, in one step
            else:
                tags.put(result, found)
        elif found is not _UNTYPED:
            _tag(args[0] if known.in_place and args else result, found)
            if result.__class__ is tuple:
                return Pieces(result)
        if told is not None and written is not None:
            tell(told, written)
        return result

    def keep(self, memo: dict[Any, Any], key: Any, found: Any) -> None:
        """Remember what was found, in the memo of a mesh."""
        if len(memo) >= _MEMO_SIZE:
            memo.clear()
        memo[key] = found

    def _infer(
        self,
        call: Call,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        pattern: Pattern | None,
    ) -> Any:
        where = call.op.name
        if call.in_place and not where.endswith("_"):
            where += "_"
        inference = CallInference(call, where, self._mesh or NO_MESH, args, kwargs)
        tensors = inference.tensors
        if tensors and tags.get(tensors[0]) is None:
            # It is being initialised, or copied (by a module's `to`, a state dict) before
            # it is declared; without a type it stays, so nothing can be made of it.
            if call.op.overwrites if call.in_place else call.op.copies:
                return _UNTYPED
        if self.lenient and any(tags.get(t) is None for t in tensors):
            return _UNTYPED
        try:
            return inference.infer(pattern)
        except PlacementError:
            raise  # of a tensor without a type
        except Refusal as refusal:
            if refusal.kind == SHAPES:
                _let_torch_say(call, func, where, args, kwargs)
            raise refused_by(refusal, inference, func) from None
        except (
            UnknownForm,
            TypeError,
            LookupError,
            ArithmeticError,
            AttributeError,
            ValueError,
        ) as error:
            _let_torch_say(call, func, where, args, kwargs)
            raise refused_call(
                where,
                f"called in a form that the table does not know: {error}",
                advice="pass the arguments as the torch documentation names them",
            ) from None


# A result that stays without a type.
_UNTYPED = object()


def _let_torch_say(
    call: Call, func: Any, where: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise torch's own error for a call that is refused: it says better what is wrong.

    Nothing is changed where torch takes the call: an in-place op gets a copy.
    """
    if call.op.needs_memory:
        return  # torch does not look whether the shapes fit
    writes = call.in_place or kwargs.get("inplace")
    mine = (args[0].detach().clone(), *args[1:]) if writes and args else args
    try:
        func(*mine, **kwargs)
    except (RuntimeError, IndexError, ValueError) as torchs:
        refuse_pieces(torchs, where, (args, kwargs))
        raise


def _key(arg: Any) -> Any:
    """What inference sees of an argument, hashable; what is frequent is asked first."""
    kind = arg.__class__
    if kind in _PLAIN:
        return kind, arg
    if kind is float:
        return kind, not arg  # of a number only this matters to types, as a rule
    if kind is slice:
        bounds = arg.start, arg.stop, arg.step
        return (kind, *bounds) if _is_all_bound(map(type, bounds)) else (kind, _key(bounds))
    if kind is tuple or kind is list:
        return (kind, *arg) if _is_all_int(map(type, arg)) else (kind, *map(_key, arg))
    if kind in RANK_NUMBERS:
        return arg.facts, kind, plain(arg)
    if isinstance(arg, Tensor):
        tag = tags.get(arg)
        if tag is not None and tag.fresh is not None and is_behind(arg):
            tag = type_or_error(arg, "an op")
        return tag, arg.shape, arg.dtype
    if isinstance(arg, list | tuple):
        return kind, *map(_key, cast(Any, arg))
    if kind.__hash__ is None:
        return kind, id(arg)
    return (float, not arg) if isinstance(arg, float) else (kind, arg)


def check_fit(where: str, result: Any, found: Any) -> None:
    """Raise MisfitError if a result is not as large as its type says of this rank's piece.

    Such a type would be a mistake of this package, and must not be handed out.
    """
    for tensor, known in _paired(result, found):
        if tensor.dtype is torch.bool:
            refuse_bools(where, tensor, known)
        for dim, axes in known.cut_dims.items():
            shard = known.by_axis[axes[-1]]
            assert isinstance(shard, Shard) and shard.extent is not None
            rows = shard.extent.sizes[known.mesh.place[axes[-1]]]
            if dim >= tensor.dim() or tensor.shape[dim] != rows:
                raise MisfitError(
                    f"{where}: the inferred type {known!r} does not fit a result of shape "
                    f"{tuple(tensor.shape)}. This is a mistake in placements: please "
                    "report the line and the types of its operands"
                )


def _paired(result: Any, found: Any) -> list[tuple[Tensor, TensorType]]:
    """Each tensor of a result with its type; a list of types is repeated as needed."""
    several = isinstance(found, list | tuple)
    results = [result] if isinstance(result, Tensor) else result
    if not isinstance(results, list | tuple):
        return []
    types = cast(Any, found if several else [found])
    tensors = [t for t in cast(Any, results) if isinstance(t, Tensor)]
    return [(t, types[min(k, len(types) - 1)]) for k, t in enumerate(tensors)]


def _tag(result: Any, found: Any) -> None:
    """Tag a tensor, or each of several."""
    for tensor, known in _paired(result, found):
        tags.put(tensor, known)


class _Joined(Block[Checker]):
    """The block of `typecheck()`: a checker of its own, or the one around it."""

    def steps(self) -> Steps[Checker]:
        outer = current.mode
        if outer is not None:
            return opened(outer)
        own: Checker = Typecheck()
        return warned_without_a_mesh("typecheck()", opened(own))

    def _recreate_cm(self) -> "_Joined":
        return _Joined()  # as a decorator: one for each call


def typecheck() -> Block[Checker]:
    """Check every op inside the `with` block; a block inside another changes nothing.

    Types are on the axes of the current mesh. Warns (UncheckedWarning) if there was none
    from the beginning of the block to its end.
    """
    return _Joined()
