"""Put, read and clear the type of a tensor, and name every attribute of this package.

Only this file touches these attributes, but for the mode, which sets TYPE itself on a new
tensor where `put` would do no more: each checked op comes there. A tensor holds its type
and no type holds a tensor, so nothing is kept alive. A tensor is pickled without its type,
because the file may be loaded without this package.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from placements._torch import (
    CHUNK_LIST,
    SHARD,
    WRITE_ITEMS,
    attribute_of_tensors,
    bytes_of,
    leave_out_of_pickles,
    memory_of,
    version_of,
)
from placements.types.axis import AxisTypeLike, TypesLike
from placements.types.mesh import Mesh
from placements.types.tensor import Identity, TensorType

leave_out_of_pickles("_placements_", WRITE_ITEMS, CHUNK_LIST, SHARD)

TYPE = "_placements_type"
_VERSION = "_placements_version"  # of a factory's tensor, when it got its type
DECLARED = "_placements_declared"  # on a module: what `declare` said of its own tensors
_ROOT = "_placements_root"  # on a module: `declare` was called for it and what is below
# On tensors: what typed collectives did to a gradient, and that a sum has read its memory.
NOTE = "_placements_gradient"
READ = "_placements_read"
_OF_A_LEAF = "_placements_of_a_leaf"  # on a tensor that was read as the gradient of one
# On a parameter that others reduce: in which dtype FSDP2 does, over which ranks DDP does.
_REDUCE_DTYPE = "_placements_reduce_dtype"
_SUMMED_RANKS = "_placements_summed_ranks"
# On a parameter that FSDP2 holds back a gradient of; on one that sharding replaced, its
# name, and on the one in its place.
_WAITS = "_placements_waits"
_REPLACED = "_placements_replaced"
_REPLACEMENT = "_placements_replacement"
# On the node of an autograd.Function in the graph: the types that its forward had.
FUNCTION = "_placements_function"
# On memory: how often a checked op wrote it (torch counts for a tensor and its views, but
# not for x.data and copies, and not under inference_mode); the types that names for parts
# of it have for good; that a cast made a name under inference_mode, where torch knows no
# views; that it is the memory of a tensor in an array of numpy.
_WRITES = "_placements_writes"
_NAMES = "_placements_names"
_CAST = "_placements_cast"
_LENT = "_placements_lent"
# On memory that a program asked for: the axes on which its size differs, with letters.
_AXES = "_placements_axes"
# On a module's class: the arrays in its annotations, whose dtypes are checked.
STATED = "_placements_stated"


# get(tensor): the tensor's type; None if it has none.
get: Callable[[Tensor], TensorType | None] = attribute_of_tensors(TYPE)
# seen_of(tensor): what inference sees of a tensor: what stands for its type, its shape and
# its dtype. AttributeError if it has no type, or a fresh one, or one that is met first.
Seen = tuple[Identity | None, torch.Size, torch.dtype]
seen_of: Callable[[Tensor], Seen] = attribute_of_tensors(
    TYPE, f"{TYPE}.steady_identity", "shape", "dtype"
)
# is_gradient(tensor): whether it was read as the gradient of a leaf.
is_gradient: Callable[[Tensor], bool | None] = attribute_of_tensors(_OF_A_LEAF)


def put(tensor: Tensor, tensor_type: TensorType) -> None:
    before = get(tensor)
    setattr(tensor, TYPE, tensor_type)
    if tensor_type.fresh is not None:
        setattr(tensor, _VERSION, writes_of(tensor))
    elif before is not None and before.fresh is not None:
        note_name(tensor)  # other names for the memory may still be fresh


def clear(tensor: Tensor) -> None:
    if get(tensor) is not None:
        delattr(tensor, TYPE)


def forget_factory(tensor: Tensor) -> None:
    """Clear the type that a factory gave, after unchecked code wrote to the tensor.

    A declared type stays: whoever declared it answers for the values.
    """
    known = get(tensor)
    if known is not None and known.fresh is not None:
        clear(tensor)


def is_overwritten(tensor: Tensor) -> bool:
    """Return whether a factory's tensor was written through another name for its memory."""
    known = get(tensor)
    if known is None or known.fresh is None:
        return False
    return getattr(tensor, _VERSION, None) != writes_of(tensor)


def writes_of(tensor: Tensor) -> int:
    """Return a number that changes with every write to the memory of a tensor."""
    return getattr(memory_of(tensor), _WRITES, 0) + version_of(tensor)


def count_write(tensor: Tensor) -> None:
    """Count a write for all names of a tensor's memory."""
    memory = memory_of(tensor)
    if memory is not None:
        setattr(memory, _WRITES, getattr(memory, _WRITES, 0) + 1)


def note_name(tensor: Tensor) -> None:
    """Remember with the memory of a tensor that the tensor keeps its type."""
    known, memory = get(tensor), memory_of(tensor)
    if known is not None and known.fresh is None and memory is not None:
        names = getattr(memory, _NAMES, frozenset[tuple[int, int, TensorType]]())
        setattr(memory, _NAMES, names | {(*bytes_of(tensor), known)})


def types_of_names(tensor: Tensor) -> list[TensorType]:
    """Return the types of noted names for memory that a tensor lies in."""
    names = getattr(memory_of(tensor), _NAMES, ())
    start, stop = bytes_of(tensor) if names else (0, 0)
    return [known for first, end, known in names if first < stop and start < end]


def note_cast(before: Tensor, after: Tensor) -> None:
    """Remember that a tensor is another name for the memory of one of another type."""
    if memory_of(before) is not memory_of(after):
        return
    if after.is_inference():
        setattr(memory_of(after), _CAST, True)
    known = get(before)
    if known is not None and known.fresh is not None:
        note_name(after)


def is_cast(tensor: Tensor) -> bool:
    """Whether a cast made another name for this memory, under inference_mode."""
    return getattr(memory_of(tensor), _CAST, False)


def lend(tensor: Tensor) -> None:
    """Remember that the memory of a tensor is that of another one, by way of numpy."""
    setattr(memory_of(tensor), _LENT, True)


def is_lent(tensor: Tensor) -> bool:
    return getattr(memory_of(tensor), _LENT, False)


def put_axes(memory: Any, letters: tuple[tuple[str, str], ...]) -> None:
    """Remember on which axes the size of a memory differs by rank."""
    setattr(memory, _AXES, letters)


def axes_of(memory: Any) -> tuple[tuple[str, str], ...]:
    return getattr(memory, _AXES, ())


def mark_gradient(grad: Tensor) -> None:
    """Remember that a tensor is the `.grad` of another one."""
    setattr(grad, _OF_A_LEAF, True)


def put_reduce_dtype(parameter: Tensor, dtype: torch.dtype) -> None:
    """Remember in which dtype FSDP2 reduces the gradient of a parameter."""
    setattr(parameter, _REDUCE_DTYPE, dtype)


def reduce_dtype(parameter: Tensor) -> torch.dtype | None:
    return getattr(parameter, _REDUCE_DTYPE, None)


def put_summed_ranks(parameter: Tensor, ranks: frozenset[int]) -> None:
    """Remember over which ranks DDP reduces the gradient of a parameter."""
    setattr(parameter, _SUMMED_RANKS, ranks)


def summed_ranks(parameter: Tensor) -> frozenset[int] | None:
    return getattr(parameter, _SUMMED_RANKS, None)


def put_waits(parameter: Tensor, waits: bool) -> None:
    """Remember whether FSDP2 holds back a gradient until a later backward."""
    if waits or hasattr(parameter, _WAITS):
        setattr(parameter, _WAITS, waits)


def waits(parameter: Tensor) -> bool:
    return getattr(parameter, _WAITS, False)


def put_replaced(parameter: Tensor, name: str, by: Tensor) -> None:
    """Remember that sharding put another tensor in the place of a parameter."""
    setattr(parameter, _REPLACED, name)
    setattr(by, _REPLACEMENT, True)


def replaced(parameter: Tensor) -> str | None:
    return getattr(parameter, _REPLACED, None)


def is_replacement(parameter: Tensor) -> bool:
    return getattr(parameter, _REPLACEMENT, False)


def declarations(module: nn.Module) -> Mapping[str, "Declaration"]:
    """Return what `declare` said of this module's own parameters and buffers."""
    return module.__dict__.get(DECLARED, {})


class Declaration(dict[str, AxisTypeLike]):
    """What `declare` said of one tensor, and the type that it gave the tensor last."""

    last: tuple[Mesh, tuple[int, ...], TensorType] | None = None
    # The same type, if nothing is cut, so that it does not depend on the shape.
    settled: TensorType | None = None

    def __reduce__(self) -> Any:
        return Declaration, (dict(self),)  # a copy of a module works its types out itself


def remember(module: nn.Module, name: str, types: TypesLike) -> None:
    """Keep a declaration with the module; the tensors get it when the module is called."""
    module.__dict__.setdefault(DECLARED, {})[name] = Declaration(types)


def mark_as_root(module: nn.Module) -> bool:
    """Note that `declare` was called for this module; whether that is new."""
    is_new = _ROOT not in module.__dict__
    module.__dict__[_ROOT] = True
    return is_new
