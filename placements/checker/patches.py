"""The list of what is replaced in torch and Python while checking is on, and why.

A torch-function mode sees the calls of torch's functions. What it does not see is found by
replacing the methods that such a call goes through, for as long as any block is open.

Other changes last longer than a block. Two last from import on (`_torch/tensors.py`):
`Tensor.__getstate__` leaves types out of pickles, since a tensor may be saved after its
block has ended; and the class answers None for the type of a tensor that has none. Two
methods of FSDP2 are wrapped from the first DeviceMesh on (`_torch/fsdp.py`), because wrong
wraps are refused with checking off, too. `Optimizer.state_dict` is wrapped from the first
declared module on (`_torch/modules.py`), because `dcp` would lose pieces of its state.
"""

import builtins
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import call, delitem, itemgetter, setitem
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from placements import _torch
from placements._torch import OBJECT_TO_TENSOR, unsupported
from placements.checker import (
    buffers,
    functions,
    guards,
    hooks,
    layout,
    numbers,
    writes,
)
from placements.checker.training import steps
from placements.runtime import forgotten
from placements.types.mesh import Mesh

_MISSING = object()


class _Patch(NamedTuple):
    owner: Any  # a class or a module, or a dict of hooks
    name: str
    make: Callable[[Any], Any]  # the entry of the owner's dict -> what replaces it


def _patches() -> Iterator[_Patch]:
    # A Function hides a backward that nobody checked.
    yield _Patch(torch.autograd.Function, "apply", functions.checked_function)
    # A module's state may be replaced, and checkpointers would keep the old tensor.
    for asked in _torch.REGISTRATION_HOOKS:
        yield _Patch(asked, "placements", partial(_replaced_by, buffers.check_registration))
    # A hook of a module may change gradients, and checking is suspended where it runs.
    of_modules = partial(_replaced_by, hooks.CheckedModuleHooks)
    yield _Patch(nn.modules.module, "BackwardHook", of_modules)
    # A step with gradients that are not summed makes the ranks' parameters part.
    yield _Patch(_torch.STEP_HOOKS, "placements", partial(_replaced_by, steps.before_step))
    # The type of a tensor says what its old memory holds.
    yield _Patch(Tensor, "set_", writes.watched_set)
    # Other names for the memory of a tensor, which no mode sees torch make.
    yield _Patch(nn.Parameter, "__new__", writes.noted_parameter)
    yield _Patch(torch, "from_numpy", writes.noted_array)
    yield _Patch(torch, "frombuffer", writes.noted_array)
    # The product of a torch.Size is a plain number.
    yield _Patch(torch, "broadcast_shapes", numbers.broadcast_sizes)
    # Python's own return one number, which does not know the axes of the others.
    for name in ("max", "min"):
        yield _Patch(builtins, name, forgotten.of_all_axes)
    # Written in C, they read the value of such a number and ask nobody.
    for name in forgotten.OF_MATH:
        yield _Patch(math, name, forgotten.of_own_numbers)
    # A scripted function runs inside torch, where no mode sees what it writes.
    for scripted in _torch.SCRIPTED:
        yield _Patch(scripted, "__call__", guards.watched_script)
    # A compiled function would be traced with the checker in it, and reuse what it found
    # for other types: code in a block runs as it is written.
    yield _Patch(torch, "compile", guards.compiling_later)
    stance = _torch.stance()
    if stance is not None:
        yield _Patch(stance[0], stance[1], partial(_replaced_by, stance[2]))
    # A mask of blocks only says which blocks to skip; what it masks is read from its mod.
    makers, names = _torch.mask_makers() or (None, ())
    for name in names:
        yield _Patch(makers, name, guards.apart)
    # torch does not hand the weight of l1_loss on to a mode, which would compute without.
    yield _Patch(nn.functional, "l1_loss", guards.refusing_weight)
    # A saved tensor would hold sizes that know their axis, which readers do not expect.
    yield _Patch(Tensor, "__reduce_ex__", numbers.with_plain_sizes)
    # The size of the memory of a piece differs by rank, as the piece does.
    for name in ("nbytes", "size"):
        counted = partial(layout.bytes_of_memory, name)
        yield _Patch(torch.UntypedStorage, name, counted)
    if not dist.is_available():
        return
    # A rank is a number that differs by rank, whichever way a program asks for it. The
    # functions of torch.distributed may have been imported by name before, so that what
    # they call is replaced and not they.
    yield _Patch(Mesh, "coordinate", numbers.own_coordinate)
    yield _Patch(DeviceMesh, "get_local_rank", numbers.local_rank)
    yield _Patch(DeviceMesh, "get_coordinate", numbers.coordinate)
    yield _Patch(dist.distributed_c10d, "get_group_rank", numbers.rank_in_group)
    for owner in _group_classes():
        if "rank" in owner.__dict__:
            yield _Patch(owner, "rank", numbers.rank_of_group)
    # A mesh computes with tensors of its own, and makes process groups.
    yield _Patch(DeviceMesh, "__init__", guards.apart)
    yield _Patch(DeviceMesh, "__getitem__", guards.apart)
    yield _Patch(DeviceMesh, "mesh", guards.ranks_of_mesh)
    # FSDP2 gathers parameters and frees them again, in memory of its own.
    group = _torch.group_class()
    if group is not None:
        for name in _torch.INSIDE_A_GROUP:
            yield _Patch(group, name, guards.apart)
    # A raw collective moves data between ranks behind the types.
    for owner in _group_classes():
        for name, method in owner.__dict__.items():
            if callable(method) and guards.typed_call(name) is not None:
                yield _Patch(owner, name, partial(guards.refusing, name))
    # Every collective of Python objects makes tensors of them first.
    yield _Patch(dist.distributed_c10d, OBJECT_TO_TENSOR, guards.refusing_objects)


def _replaced_by(new: Any, old: Any) -> Any:
    return new


def _group_classes() -> list[Any]:
    """Return the process group, and backends written in Python."""
    found: list[Any] = [dist.ProcessGroup] if dist.is_available() else []
    for owner in found:
        found.extend(owner.__subclasses__())
    return found


class Replacements:
    """What to replace, worked out beforehand: putting it in place is a list of C calls.

    The entry of the owner's dict counts, not what getattr makes of it: that has to come
    back. What is asked at each block is asked owner by owner, in few calls of C.
    """

    def __init__(self, owners: list[Any], patches: Iterable[_Patch]) -> None:
        self.owners = owners
        self.install: list[Callable[[], None]] = []
        self._undo: list[Callable[[], None]] = []
        self._undo_each: list[tuple[Callable[[], Any], Any, Callable[[], None]]] = []
        self._readers: list[Callable[[], Any]] = []
        self._new: list[Any] = []
        by_owner: dict[int, list[_Patch]] = {}
        for patch in patches:
            by_owner.setdefault(id(patch.owner), []).append(patch)
        for group in by_owner.values():
            self._plan(group[0].owner, group)
        self._old = self._now()

    def _plan(self, owner: Any, patches: list[_Patch]) -> None:
        is_dict = owner.__class__ in (dict, OrderedDict)
        entries = cast(Mapping[str, Any], owner if is_dict else vars(owner))
        put, take = (setitem, delitem) if is_dict else (setattr, delattr)
        old = {name: entries[name] for _, name, _ in patches if name in entries}
        new: dict[str, Any] = {}
        for _, name, make in patches:
            inherited = name not in old
            if inherited and not is_dict and not hasattr(owner, name):
                raise unsupported([f"{owner.__name__}.{name} (to check its calls)"])
            new[name] = make(old[name] if name in old else getattr(owner, name, _MISSING))
            read = partial(entries.get, name, _MISSING)
            undo = partial(take, owner, name), partial(put, owner, name, old.get(name))
            self._undo_each.append((read, new[name], undo[0] if inherited else undo[1]))
            if inherited:
                self._readers.append(read)
                self._new.append(new[name])
        if old:
            read_all = itemgetter(*old)
            self._readers.append(partial(read_all, entries))
            self._new.append(read_all(new))
        if isinstance(entries, dict) and len(old) == len(new):
            update: Any = entries.update
            self.install.append(partial(update, new))
            self._undo.append(partial(update, old))
        else:
            self.install += [partial(put, owner, name, one) for name, one in new.items()]
            self._undo += [undo for _, _, undo in self._undo_each[-len(new) :]]

    def _now(self) -> list[Any]:
        return list(map(call, self._readers))

    def fits(self, owners: list[Any]) -> bool:
        """Return whether torch is as it was when the plan was made."""
        return self.owners == owners and self._now() == self._old

    def undo(self) -> list[Callable[[], None]]:
        """Return the calls that put torch back; what others replaced since stays."""
        if self._now() == self._new:
            return self._undo
        return [undo for read, new, undo in self._undo_each if read() is new]


_last: list[Replacements] = []


def plan() -> Replacements:
    """Return what to replace now. Made once, and again when torch was changed by others."""
    # Other classes of groups need another one, and so does what was imported since:
    # torch.compile, flex_attention, FSDP2.
    imported = (_torch.stance() is not None, _torch.mask_makers() is not None)
    owners = [*_group_classes(), *imported, _torch.group_class()]
    if not (_last and _last[0].fits(owners)):
        _last[:] = [Replacements(owners, _patches())]
    return _last[0]
