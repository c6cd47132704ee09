"""The words that only programs for peers use."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from placements import TypesLike, unchecked
from placements.testing import device_mesh
from spmd_moe.bugs.record import mine


def loaded(pieces: Sequence[Tensor]) -> Tensor:
    """Return this rank's piece as a data loader does: a plain tensor without a type."""
    with unchecked():
        return pieces[dist.get_rank()].detach().clone()


# `mine` in a program for DTensor, where `opinions.py` makes it a DTensor: hence any type.
placed: Callable[..., Any] = mine


def from_local(local: Tensor, *placements: Placement) -> Any:
    """Make a DTensor of what this rank holds: a claim that nobody checks."""
    return DTensor.from_local(local, device_mesh(), placements, run_check=False)


def locally(body: Callable[[], Tensor], outs: TypesLike) -> Tensor:
    """Run a region without global types: `local_map` of spmd_types in its global mode.

    `outs` is the type of the result, which nothing but the region says; elsewhere there is
    no difference between a region and the program around it.
    """
    return body()
