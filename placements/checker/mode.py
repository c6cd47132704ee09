"""The torch-function mode: read the operands' types, infer, tag the results.

Inference runs before the op, so that a refused op changes nothing. Its result is kept by
operand types, shapes and other arguments; the keys hold no tensors.
"""

from typing import Any, cast

from torch import Tensor
from torch.overrides import TorchFunctionMode

from placements.checker.block import opened
from placements.checker.call import CallInference, UnknownForm, tensors_in
from placements.checker.lookup import KNOWN, Call, resolve
from placements.checker.numbers import Pieces
from placements.checker.writes import check_write
from placements.inference.numbers import RANK_NUMBERS, numbers_in
from placements.inference.terms import SHAPES, Refusal
from placements.runtime import tags
from placements.runtime.blocks import Block, Steps, block
from placements.runtime.describe import described
from placements.runtime.errors import (
    MisfitError,
    PlacementError,
    refused_call,
    type_or_error,
)
from placements.runtime.mesh import NO_MESH, current_mesh, said_meshes
from placements.runtime.state import Checker, Observer, block_here, current
from placements.runtime.unchecked import warned_without_a_mesh
from placements.types.axis import Shard
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType

_MEMO_SIZE = 2048

get_type = tags.get  # looked up once: this is the hot path


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
        here = block_here.get()
        if here is None or here.mode is not self or not here.is_open:
            if current.mode is not self:  # a task that is in no block, or in another one
                return func(*args, **(kwargs or {}))
        known = KNOWN.get(func)
        if known is None:
            known = resolve(func)
        if known.__class__ is not Call:
            return known(self, func, args, kwargs or {})
        scope = said_meshes.innermost.get()  # as current_mesh, in one step
        mesh = scope.value if scope is not None and scope.is_open else current_mesh()
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
        if known.op.reads_floats:
            key.append(repr((args[1:], kwargs)))
        hashed = tuple(key)
        found: Any = self._memo.get(hashed)
        is_new = found is None or stale
        if is_new:
            found = self._infer(known, func, args, kwargs or {})
            if found is not _UNTYPED:
                if len(self._memo) >= _MEMO_SIZE:
                    self._memo.clear()
                self._memo[hashed] = found
        if args and (known.in_place or (kwargs and kwargs.get("inplace"))):
            check_write(known.op.name, args[0])
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except (RuntimeError, IndexError, ValueError) as error:
            _refuse_pieces(error, known.op.name, (args, kwargs))
            raise
        if is_new and found is not _UNTYPED:
            check_fit(known.op.name, args[0] if known.in_place and args else result, found)
        if found.__class__ is TensorType and isinstance(result, Tensor):
            tags.put(result, cast(TensorType, found))
        elif found is not _UNTYPED:
            _tag(args[0] if known.in_place and args else result, found)
            if result.__class__ is tuple:
                return Pieces(result)
        return result

    def _infer(
        self,
        call: Call,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        where = call.op.name
        if call.in_place and not where.endswith("_"):
            where += "_"
        if kwargs.get("out") is not None:
            raise refused_call(
                where,
                "out= would change a tensor behind its type",
                rule="other names for the same memory would not know",
                advice="use the result",
            )
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
            return inference.infer()
        except PlacementError:
            raise  # of a tensor without a type
        except Refusal as refusal:
            if refusal.kind == SHAPES:
                try:
                    func(*args, **kwargs)  # torch says better what is wrong
                except (RuntimeError, IndexError, ValueError) as torchs:
                    _refuse_pieces(torchs, where, (args, kwargs))
                    raise
            raise inference.error(refusal) from None
        except (
            UnknownForm,
            TypeError,
            LookupError,
            ArithmeticError,
            AttributeError,
            ValueError,
        ) as error:
            try:
                func(*args, **kwargs)  # torch says better what is wrong with its arguments
            except (RuntimeError, IndexError, ValueError) as torchs:
                _refuse_pieces(torchs, where, (args, kwargs))
                raise
            raise refused_call(
                where,
                f"called in a form that the table does not know: {error}",
                advice="pass the arguments as the torch documentation names them",
            ) from None


# A result that stays without a type.
_UNTYPED = object()


def _refuse_pieces(error: Exception, where: str, arguments: Any) -> None:
    """Raise PlacementError where torch was given pieces that do not fit."""
    tensors = list(tensors_in(arguments))
    known = [tags.get(t) for t in tensors]
    cut = [k for k in known if k is not None and any(t.letter in "SV" for t in k.types)]
    own_numbers = next(numbers_in(arguments), None) is not None
    of_torch = error.__class__ in (RuntimeError, IndexError, ValueError)
    if of_torch and (cut or own_numbers):
        raise refused_call(
            where,
            f"torch does not take these pieces: {error}",
            rule="the sizes of a piece are not those of the whole",
            operands=[described(t, k) for t, k in zip(tensors, known, strict=True)],
        ) from error


def _key(arg: Any) -> Any:
    """What inference sees of an argument, hashable."""
    if isinstance(arg, Tensor):
        if tags.is_overwritten(arg):
            type_or_error(arg, "an op")
        return tags.get(arg), arg.shape, arg.dtype
    if isinstance(arg, list | tuple):
        items = cast(Any, arg)
        return items.__class__, *map(_key, items)
    if isinstance(arg, slice):
        bounds = cast(Any, arg)
        return "slice", _key(bounds.start), _key(bounds.stop), _key(bounds.step)
    if arg.__hash__ is None:
        return arg.__class__, id(arg)
    if arg.__class__ in RANK_NUMBERS:
        return arg.facts, arg.__class__, float(arg)
    if isinstance(arg, float):
        return float, not arg  # of a number only this matters to types, as a rule
    return arg.__class__, arg


def check_fit(where: str, result: Any, found: Any) -> None:
    """Raise MisfitError if a result is not as large as its type says of this rank's piece.

    Such a type would be a mistake of this package, and must not be handed out.
    """
    for tensor, known in _paired(result, found):
        for dim, axes in known.cut_dims.items():
            shard = known.by_axis[axes[-1]]
            assert isinstance(shard, Shard) and shard.extent is not None
            rows = shard.extent.local_size(known.mesh.place[axes[-1]])
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
