"""The torch-function mode: read the operands' types, infer, tag the results.

Inference runs before the op, so that a refused op changes nothing. Its result is kept by
operand types, shapes and other arguments; the keys hold no tensors.
"""

from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from placements.checker.block import opened
from placements.checker.call import Call, CallInference, UnknownForm, tensors_in
from placements.checker.keys import (
    PLAIN,
    TENSORS,
    Kept,
    WithNumbers,
    as_plain,
    is_in_key,
    key_of,
    seen_anew,
)
from placements.checker.lookup import KNOWN, passed, resolve
from placements.checker.numbers import Pieces, shape_of
from placements.checker.refusals import (
    let_torch_say,
    refuse_bools,
    refuse_pieces,
    refused_by,
    unknown_form,
)
from placements.checker.writes import check_write, into
from placements.inference.numbers import RANK_NUMBERS, numbers_in
from placements.inference.templates import Pattern, pattern_of
from placements.inference.terms import SHAPES, Refusal
from placements.runtime import tags
from placements.runtime.blocks import Block, Steps, block
from placements.runtime.errors import MisfitError, PlacementError
from placements.runtime.filled import Below, below, tell
from placements.runtime.mesh import NO_MESH, current_mesh, said_meshes
from placements.runtime.scopes import Scope
from placements.runtime.state import Checker, Observer, block_here, current, shared_axes
from placements.runtime.unchecked import warned_without_a_mesh
from placements.types.axis import Shard
from placements.types.mesh import Mesh
from placements.types.tensor import Identity, TensorType, one_of

_MEMO_SIZE = 4096

# Looked up once: this is the hot path.
_type_of = tags.get
_seen_of = tags.seen_of
_TYPE = tags.TYPE
_block_here = block_here.get
_said_mesh = said_meshes.innermost.get


class Typecheck(Block["Typecheck"], TorchFunctionMode):
    """Infer and check the type of every tensor that an op makes, inside `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.lenient = False  # inside a region: what is not known stays untyped
        self.observer: Observer | None = None
        self._mesh: Mesh | None = None
        self._scope: Scope[Mesh | None] | None = None
        self.memo = NO_MESH.inferred

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
        known = KNOWN.get(func) or resolve(func)
        if known.__class__ is not Call:
            if known is passed:
                return func(*args, **kwargs) if kwargs else func(*args)
            if known is shape_of and not kwargs:  # the key is that of `shape_of`
                try:
                    if len(args) == 1:
                        return self.memo[func, _seen_of(args[0])]
                    if args[1].__class__ is int:
                        return self.memo[func, _seen_of(args[0]), args[1]]
                except (KeyError, AttributeError):
                    pass
            return known(self, func, args, kwargs or {})
        scope = _said_mesh()
        if scope is not self._scope or scope is None or not scope.is_open:
            self._look_for_mesh()
        key: list[Any] = [known]
        every = args
        if kwargs:
            if "out" in kwargs and kwargs["out"] is not None:
                return into(self, known, func, args, kwargs)
            key += kwargs  # the names; a string among the values follows its class
            every = (*args, *kwargs.values())
        for arg in every:
            kind = arg.__class__
            if kind in TENSORS:
                try:
                    key.append(_seen_of(arg))
                    continue
                except AttributeError:
                    pass
                key.append(seen_anew(arg, known.op.name))
            elif kind in PLAIN:
                key += kind, arg
            elif kind in RANK_NUMBERS and arg.key is not None:
                key.append(arg.key)
            elif kind is float:
                key += kind, not arg  # as in `key_of`
            else:
                key.append(key_of(arg))
        if known.takes_shared:
            key.append(shared_axes())
        if known.reads_floats:
            key.append(repr((args[1:], kwargs)))
        hashed = tuple(key)
        given = args
        found: Any = self.memo.get(hashed)
        if found.__class__ is not TensorType:
            if found.__class__ is not WithNumbers:
                return self._call(known, func, args, kwargs or {}, hashed, found)
            given = (args[0], *found.plain)
            found = found.type
        try:
            result = func(*given, **kwargs) if kwargs else func(*given)
        except (RuntimeError, IndexError, ValueError) as error:
            refuse_pieces(error, known.op.name, (args, kwargs))
            raise
        if result.__class__ is Tensor:
            before = _type_of(result)
            if before is None:
                setattr(result, _TYPE, found)  # as tags.put, in one step
            elif before is not found:  # else it is an operand: x.contiguous()
                tags.put(result, found)
            return result
        return _tagged(result, found)

    def _call(
        self,
        known: Call,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: tuple[Any, ...],
        kept: Kept | None,  # None: it is new
    ) -> Any:
        """A call that is new, or that writes, or gives several tensors or fresh ones."""
        is_new = kept is None
        found = self._found_anew(known, func, args, kwargs, key) if is_new else kept.type
        told: Below | None = None
        written: Tensor | None = None
        if known.in_place or kwargs.get("inplace"):
            written = cast(Tensor, args[0] if args else next(tensors_in(kwargs)))
            after = found if found.__class__ is TensorType else None
            if after is not None and written.dtype is torch.bool:
                refuse_bools(known.op.name, written, cast(TensorType, after))
            check_write(known.op.name, written, cast(TensorType | None, after))
            told = below(written)
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError) as error:
            refuse_pieces(error, known.op.name, (args, kwargs))
            raise
        if written is not None:
            tags.count_write(written)
        if found is not _UNTYPED:
            typed = args[0] if known.in_place and args else result
            if is_new:
                check_fit(known.op.name, typed, found)
                self.keep(self.memo, key, _plan(known, func, args, kwargs, found))
            if isinstance(result, Tensor) or typed is result:
                result = _tagged(result, found)
            else:
                _tagged(typed, found)  # x[0] = y has no result
        if told is not None and written is not None:
            tell(told, written)
        return result

    def _look_for_mesh(self) -> None:
        """Find the memo of the current mesh, where it may be another one than before."""
        self._mesh = current_mesh()
        self._scope = _said_mesh()
        self.memo = (self._mesh or NO_MESH).inferred

    def _found_anew(self, call: Call, func: Any, args: Any, kwargs: Any, key: Any) -> Any:
        """Infer the type of a call that is not in the memo."""
        # What is called once has no other sizes. Types that differ in sizes hash alike.
        seen = [part[0] for part in key if part.__class__ is tuple]
        types_met = tuple([hash(one.type) for one in seen if one.__class__ is Identity])
        again = types_met in call.met
        call.met.add(types_met)
        mesh = self._mesh or NO_MESH
        pattern = pattern_of(mesh, key, call.sizes_alone) if again else None
        found = None if pattern is None else pattern.known()
        if found is not None:
            return found
        found = self._infer(call, func, args, kwargs, pattern)
        return one_of(found) if found.__class__ is TensorType else found

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
                let_torch_say(call, func, where, args, kwargs)
            raise refused_by(refusal, inference, func) from None
        except (UnknownForm, *_NOT_TAKEN) as error:
            let_torch_say(call, func, where, args, kwargs)
            raise unknown_form(where, error) from None


# What inference raises for arguments that torch would not take either.
_NOT_TAKEN = TypeError, LookupError, ArithmeticError, AttributeError, ValueError

# A result that stays without a type.
_UNTYPED = object()


def _plan(call: Call, func: Any, args: Any, kwargs: Any, found: Any) -> Any:
    """What the memo keeps of a call: the type alone, if one new tensor gets it."""
    writes = call.in_place or kwargs.get("inplace")
    if writes or found.__class__ is not TensorType or found.fresh is not None:
        return Kept(found)
    if call.takes_sizes and not kwargs and not isinstance(func, FunctionType):
        if next(numbers_in(args), None) is not None and is_in_key(args[1:]):
            return WithNumbers(found, tuple(map(as_plain, args[1:])))
    return found


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
    if isinstance(result, Tensor) and found.__class__ is TensorType:
        return [(result, found)]
    types: Any = cast(Any, found) if isinstance(found, list | tuple) else [found]
    if not isinstance(result, list | tuple):
        return [(result, types[0])] if isinstance(result, Tensor) else []
    tensors = [t for t in cast(Any, result) if isinstance(t, Tensor)]
    return [(t, types[min(k, len(types) - 1)]) for k, t in enumerate(tensors)]


def _tagged(result: Any, found: Any) -> Any:
    """Tag a tensor, or each of several, unless it is an operand of that type."""
    for tensor, known in _paired(result, found):
        before = _type_of(tensor)
        if before is None and known.fresh is None:
            setattr(tensor, _TYPE, known)
        elif before is not known or known.fresh is not None:
            tags.put(tensor, known)
    return Pieces(result) if result.__class__ is tuple else result


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
