"""Save and load checkpoints: in shards, complete or absent, loaded on any mesh.

Parameters, buffers and AdamW's moments are shown to `torch.distributed.checkpoint` as the
global tensors that their types say they are. Each rank writes pieces of its own, and on
another mesh each reads the rows that it holds there.
"""

import logging
import os
import shutil
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as PeerShard

from placements import Shard
from placements.parameters.held import saved_tensors
from placements.types.tensor import TensorType
from spmd_moe.training import manifest
from spmd_moe.training.errors import Unusable
from spmd_moe.training.trainer import MOMENTS, Trainer
from spmd_moe.training.world import wait_for_all

_UNFINISHED = ".unfinished-"
_dcp = cast(Any, dcp)  # its signatures are not typed to the end


def save(trainer: Trainer, directory: Path, step: int, *, mesh: str, keep: int) -> None:
    """Write a checkpoint and remove all but the last `keep`. Every rank calls it."""
    name = manifest.name_of(step)
    unfinished = directory / f"{_UNFINISHED}{name}"
    is_first = dist.get_rank() == 0
    if is_first:
        for left_over in directory.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left_over)
    wait_for_all()
    try:
        _dcp.save(global_views(trainer), checkpoint_id=unfinished)
    except CheckpointException as error:  # which is no Exception
        rank, (cause, _) = min(error.failures.items())
        raise RuntimeError(f"rank {rank} cannot write {unfinished}: {cause}") from None
    if is_first:
        manifest.write(unfinished, step, trainer.recipe, mesh)
        os.replace(unfinished, directory / name)
        for old in manifest.checkpoints_in(directory)[:-keep]:
            shutil.rmtree(old)
    wait_for_all()


def load(trainer: Trainer, path: Path, step: int, *, alone: bool = False) -> None:
    """Make `trainer` what it was after `step`. Every rank calls it, unless `alone`.

    Raises Unusable if the checkpoint has not what the model needs.
    """
    with warnings.catch_warnings(), _nothing_logged():
        # that it is alone is what the caller said
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            _dcp.load(global_views(trainer), checkpoint_id=path, no_dist=alone)
        except CheckpointException as error:  # which is no Exception
            _, (cause, _) = min(error.failures.items())
            raise Unusable(
                f"{path} is no checkpoint of this model ({_first_line(cause)}); "
                f"{manifest.otherwise(path)}"
            ) from None
    trainer.set_step(step)


@contextmanager
def _nothing_logged() -> Generator[None]:
    """Silence torch's log of an error that is raised as well."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def global_views(trainer: Trainer) -> dict[str, Tensor]:
    """Name -> the global tensor that ranks hold together, over the memory in use."""
    views: dict[str, Tensor] = {}
    for held in saved_tensors("checkpoint", trainer.model, trainer.meshes):
        views[f"model.{held.name}"] = _view(held.tensor, held.type)
        state = cast(dict[str, Tensor], trainer.optimizer.state.get(held.tensor, {}))
        for moment in MOMENTS if state else ():
            views[f"optimizer.{moment}.{held.name}"] = _view(state[moment], held.type)
    return views


def _view(tensor: Tensor, found: TensorType) -> Tensor:
    ranks = found.mesh.device_mesh
    if ranks is None:
        return tensor.detach()
    types = [found.get(axis) for axis in ranks.mesh_dim_names or ()]
    assert not {t.letter for t in types if t} & set("VP"), (found, "is no global tensor")
    shape = torch.Size(found.global_shape(tuple(tensor.shape)))
    return DTensor.from_local(
        tensor.detach(),
        ranks,
        [PeerShard(t.dim) if isinstance(t, Shard) else Replicate() for t in types],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
