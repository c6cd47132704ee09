"""Save and load checkpoints: in shards, complete or absent, loaded on any mesh.

What is in the files, and how it is read on another mesh, is the business of
`sharded_state_dict`. Here a checkpoint gets its name, its manifest and its end.
"""

import logging
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from placements import load_sharded_state_dict, sharded_state_dict
from spmd_moe.training import manifest
from spmd_moe.training.errors import Unusable
from spmd_moe.training.trainer import Trainer
from spmd_moe.training.world import wait_for_all

_UNFINISHED = ".unfinished-"
_DAMAGED = ".damaged-"
_dcp = cast(Any, dcp)  # its signatures are not typed to the end


def save(trainer: Trainer, directory: Path, step: int, *, mesh: str, keep: int) -> None:
    """Write a checkpoint and remove all but the last `keep`. Every rank calls it."""
    name = manifest.name_of(step)
    unfinished = directory / f"{_UNFINISHED}{name}"
    is_first = dist.get_rank() == 0
    if is_first:
        for left_over in directory.glob(f"{_UNFINISHED}*"):
            _remove(left_over)
    wait_for_all()
    state = sharded_state_dict(trainer.model, trainer.optimizer, meshes=trainer.meshes)
    try:
        _dcp.save(state, checkpoint_id=unfinished)
    except CheckpointException as error:  # which is no Exception
        rank, (cause, _) = min(error.failures.items())
        raise RuntimeError(f"rank {rank} cannot write {unfinished}: {cause}") from None
    if is_first:
        manifest.write(unfinished, step, trainer.recipe, mesh)
        _put_aside(directory, step)
        os.replace(unfinished, directory / name)
        for old in manifest.checkpoints_in(directory)[:-keep]:
            _remove(old)
    wait_for_all()


def load(trainer: Trainer, path: Path) -> None:
    """Make `trainer` what it was when it was saved. Every rank of its meshes calls it.

    Raises Unusable if the checkpoint has not what the model needs.
    """
    with _nothing_logged():
        try:
            load_sharded_state_dict(
                trainer.model, path, trainer.optimizer, meshes=trainer.meshes
            )
        except ValueError as error:
            said = str(error).splitlines()[0]
            raise Unusable(
                f"{path} is no checkpoint of this model ({said}); "
                f"{manifest.otherwise(path)}"
            ) from None


def _put_aside(directory: Path, step: int) -> None:
    """Rename what stands for this step or a later one: the run was resumed before it.

    It was damaged, then, and would be taken for the newest checkpoint; or it is none, and
    has its name.
    """
    for path in manifest.named_in(directory):
        if manifest.step_of(path) >= step:
            aside = directory / f"{_DAMAGED}{path.name}"
            if aside.is_symlink() or aside.exists():
                _remove(aside)
            os.replace(path, aside)


def _remove(path: Path) -> None:
    """Remove a directory; of a link to one, the link."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


@contextmanager
def _nothing_logged() -> Generator[None]:
    """Silence torch's log of an error that is raised as well."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
