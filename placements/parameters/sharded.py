"""Save and load a module and its optimizer in pieces, by `torch.distributed.checkpoint`.

Each rank shows the pieces that it holds with their places in the global tensors, which
follow from the declared types. So nobody gathers anything, a rank writes what it holds, and
on any other mesh it reads what it holds there.
"""

import warnings
from collections.abc import Mapping, MutableMapping
from functools import partial
from os import PathLike
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from placements._torch import GlobalView, part_of_dtensor, require, unseen
from placements.parameters.alike import check_alike
from placements.parameters.held import Held, Meshes, meshes_or_current, saved_tensors
from placements.parameters.optimizer_state import OPTIMIZER, OptimizerState
from placements.runtime.dtensors import local_part
from placements.runtime.errors import refused
from placements.runtime.state import suspended
from placements.types.boxes import boxes_of, global_shape

MODEL = "model."


def sharded_state_dict(
    module: nn.Module, optimizer: Optimizer | None = None, *, meshes: Meshes = None
) -> dict[str, Any]:
    """Return the global tensors of a module and its optimizer, as `dcp.save` takes them.

    `dcp` is `torch.distributed.checkpoint`; `dcp.async_save` takes the dict too, and
    `load_sharded_state_dict` reads what they wrote, on any mesh. The keys are `model.` with
    the name of a parameter or persistent buffer, `optimizer.exp_avg.` and the like with the
    name of the parameter, and `optimizer` for the options of its groups. More entries of
    your own may be added. The tensors are those in use and no copies, so write them before
    the next step. Parameters may be DTensors of FSDP2. `meshes` as for `reduce_gradients`.
    Communicates: a digest of names, sizes and numbers, to see that all ranks agree.
    Raises PlacementError or ValueError for what has no global value that could be saved.
    """
    call = "sharded_state_dict"
    require("saving")
    known = meshes_or_current(call, meshes)
    if any(mesh.axes and mesh.device_mesh is None for mesh in known):
        raise ValueError(
            f"{call}: {known[0]!r} is a mesh of sizes alone, whose other ranks are not "
            "there to write their pieces; give a DeviceMesh"
        )
    with unseen(), suspended(), torch.no_grad():
        held = saved_tensors(call, module, known)
        views = {MODEL + one.name: view_of(call, one, one.tensor) for one in held}
        state: dict[str, Any] = dict(views)
        numbers: dict[str, Any] = {}
        if optimizer is not None:
            found = OptimizerState(call, optimizer, held)
            state |= {
                key: view_of(call, owner, tensor) if is_cut_alike else tensor
                for key, owner, tensor, is_cut_alike in found.tensors()
            }
            state[OPTIMIZER] = numbers[OPTIMIZER] = found.text()
        check_alike(
            call,
            known[0],
            _described(state) | numbers,
            rule="a name is one global tensor or number, so all ranks agree on it",
            advice="if a piece had no gradient on some rank, the state of its optimizer is "
            "behind: give every piece one, zero if need be",
        )
    return state


def load_sharded_state_dict(
    module: nn.Module,
    path: "str | PathLike[str]",
    optimizer: Optimizer | None = None,
    *,
    meshes: Meshes = None,
    also: MutableMapping[str, Any] | None = None,
) -> None:
    """Make a module, and its optimizer, what they were when `path` was written.

    The checkpoint is one of `dcp.save(sharded_state_dict(...))`, or of a plain
    `module.state_dict()`, on whatever mesh; a rank reads what it holds on its own. Tensors
    of the module are written in place. State that the optimizer does not have yet is made,
    and what the checkpoint does not have is dropped. `also` names further entries, with
    values of the same form, which are replaced by those that were saved. Nothing in the
    files is executed: what is no tensor and no plain value is refused.
    Communicates as `dcp.load` does; on a mesh of sizes alone nothing.
    Raises ValueError, on all ranks, if names or sizes do not fit (then nothing is written)
    or if a file is damaged.
    """
    call = "load_sharded_state_dict"
    require("saving")
    known = meshes_or_current(call, meshes)
    alone = all(mesh.device_mesh is None for mesh in known)
    with unseen(), suspended(), torch.no_grad():
        held = saved_tensors(call, module, known)
        loading = _Loading(call, held, optimizer, also or {})
        _load(call, path, loading, alone)
        loading.finish()
    if also is not None:
        also.update({key: loading.entries[key] for key in also})


class _Loading:
    """What is read of a checkpoint, made when its index is known."""

    def __init__(
        self,
        call: str,
        held: list[Held],
        optimizer: Optimizer | None,
        also: Mapping[str, Any],
    ) -> None:
        self.call, self.held, self.also = call, held, also
        self.state = None if optimizer is None else OptimizerState(call, optimizer, held)
        self.entries: dict[str, Any] = {}

    def prepare(self, reader: Any, index: Any) -> dict[str, Any]:
        """Return the dict to read into; ValueError if it is of another model."""
        saved: dict[str, Any] = index.state_dict_metadata
        # A plain `module.state_dict()` was saved under bare names.
        is_bare = not any(key.startswith(MODEL) for key in saved)
        prefix = "" if is_bare else MODEL
        wanted = {prefix + one.name: one for one in self.held}
        there = set(saved) - set(self.also) if is_bare else set(saved)
        theirs = {key for key in there if key.startswith(prefix)}
        parts = [
            f"{word} {sorted(names)[:5]}{'...' if len(names) > 5 else ''}"
            for word, names in (("missing", wanted.keys() - theirs),
                                ("left over", theirs - wanted.keys()))
            if names
        ]  # fmt: skip
        if parts:
            raise ValueError(f"the names do not fit the module: {', '.join(parts)}")
        for key, one in wanted.items():
            self._check(key, one, saved[key])
            self.entries[key] = view_of(self.call, one, one.tensor)
        if self.state is not None:
            if OPTIMIZER not in saved:
                raise ValueError("it has no optimizer in it")
            text = reader.read_plain(index, OPTIMIZER)
            for key, owner, tensor, is_cut_alike in self.state.prepared(saved, text):
                self.entries[key] = (
                    view_of(self.call, owner, tensor) if is_cut_alike else tensor
                )
        self.entries |= self.also
        return self.entries

    def finish(self) -> None:
        if self.state is not None:
            self.state.finish()

    def _check(self, key: str, one: Held, saved: Any) -> None:
        size, expected = getattr(saved, "size", None), global_shape(one.type, _shape(one))
        if size is None or tuple(size) != expected:
            raise ValueError(
                f"{key!r} is {'no tensor' if size is None else list(size)} in the "
                f"checkpoint, but {one.type!r} on {one.type.mesh!r} makes {list(expected)} "
                f"of the {list(_shape(one))} here"
            )
        theirs, ours = saved.properties.dtype, one.tensor.dtype
        if theirs != ours and not (theirs.is_floating_point and ours.is_floating_point):
            raise ValueError(f"{key!r} is {theirs} in the checkpoint, but {ours} here")


def _load(call: str, path: "str | PathLike[str]", loading: _Loading, alone: bool) -> None:
    # Imported late: most programs that use this package load no checkpoint.
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from placements._torch.checkpoint_files import PlainPlanner, PlainReader

    reader = PlainReader(path)
    planner = PlainPlanner(partial(loading.prepare, reader))
    with warnings.catch_warnings():
        # That it is alone is what the mesh says.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            cast(Any, dcp).load({}, storage_reader=reader, planner=planner, no_dist=alone)
        except CheckpointException as error:  # which is no Exception
            rank, (cause, _) = min(error.failures.items())
            said = str(cause).removeprefix(
                "metadata is None; global metadata read failed: "
            )
            where = "" if alone else f" (rank {rank})"
            raise ValueError(
                f"{call}: {path} cannot be loaded{where}: {said or type(cause).__name__}"
            ) from None


def view_of(call: str, owner: Held, tensor: Tensor) -> Tensor:
    """Return the global tensor of which `tensor` has the pieces that its owner has."""
    for axis, t in owner.type.items():
        if t.letter == "P":
            raise refused(
                call,
                f"{owner.name!r} is Partial on axis {axis!r}",
                name=owner.name,
                rule="a checkpoint in pieces holds values, and ranks hold summands of this",
                advice="all_reduce it to Replicate first, or use global_state_dict, which "
                "sums it",
            )
    local, _ = local_part(tensor)
    if local.is_meta:
        raise ValueError(
            f"{call}: {owner.name!r} is on the meta device and has no values; give it "
            "memory first: module.to_empty(device=...)"
        )
    cut_again = local_part(owner.tensor)[1]
    part = part_of_dtensor(owner.tensor) if cut_again else None
    letters = {t.letter for t in owner.type.values()}
    if part is None and not letters & {"S", "V"}:
        return local.detach()
    shape = _shape(owner)
    boxes = boxes_of(owner.type, shape, part)
    return GlobalView(global_shape(owner.type, shape), local.detach(), boxes)


def _shape(owner: Held) -> tuple[int, ...]:
    return tuple(owner.tensor.shape)


def _described(state: Mapping[str, Any]) -> dict[str, Any]:
    """What ranks must agree on: names, sizes, dtypes, and numbers that all of them hold."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            is_number = value.dim() == 0 and not key.startswith(MODEL)
            number = value.item() if is_number else None
            found[key] = [list(value.shape), str(value.dtype), number]
    return found
