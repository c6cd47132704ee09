"""Programs that run on simulated ranks and on gloo processes, with the same results."""

import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from placements.testing import run_ranks

RANKS = 4
AXES = {"dp": 2, "tp": 2}


def mine(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of small integers that is different on every rank."""
    size = torch.Size(shape).numel()
    return (torch.arange(size) % 7 + 1 + dist.get_rank()).reshape(shape).to(dtype)


def counts(sender: int, receiver: int) -> int:
    return (3 * sender + 2 * receiver) % 4


def splits() -> tuple[list[int], list[int]]:
    me = dist.get_rank()
    sent = [counts(me, r) for r in range(RANKS)]
    return sent, [counts(r, me) for r in range(RANKS)]


def name_of(program: Any) -> str:
    if not isinstance(program, partial):
        return program.__name__
    words = [getattr(a, "name", str(a)) for a in program.args]
    return "-".join([program.func.__name__, *words])


def without_warnings(program: Any) -> Any:
    with warnings.catch_warnings():
        # Deprecated by torch 2.13, still part of the interface.
        warnings.simplefilter("ignore", FutureWarning)
        return program()


def assert_backends_agree(program: Any) -> None:
    """Run a program on simulated ranks and on gloo processes: the results are equal."""
    simulated = run_ranks(AXES, without_warnings, program)
    real = run_ranks(AXES, without_warnings, program, backend="gloo")
    assert len(simulated) == len(real) == RANKS
    for one, other in zip(simulated, real, strict=True):
        leaves, tree = pytree.tree_flatten(one)
        others, other_tree = pytree.tree_flatten(other)
        assert tree == other_tree
        for a, b in zip(leaves, others, strict=True):
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(a, b, rtol=0, atol=0)
            else:
                assert a == b
