"""Rows added to other rows at an index: in place where nobody could notice, else not.

In place saves the memory of the result. It is done only where autograd keeps nothing (grad
mode is off), outside of compiled code, and if `out` shares no memory with what must stay as
it is. The op is torch's own `index_add`, which has a backward, a fake implementation, and,
in place, a schema that says what it writes.
"""

from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor

from placements import unchecked
from spmd_moe.paths.own import own_rows, pieces_like
from spmd_moe.paths.recorder import ran
from spmd_moe.permute import is_dispatched

# The mode is one for the process, and simulated ranks are threads of it.
_one_at_a_time = Lock()


def add_rows(out: Tensor, index: Tensor, rows: Tensor, *, keep: Tensor) -> Tensor:
    """Return out with rows[i] added to out[index[i]]; `keep` stays as it is.

    The result is `out` itself, written, where that is allowed. `out` must be fresh: neither
    a parameter nor a buffer, nor anything that the caller needs afterwards.
    `rows` and `index` are this rank's own, and `out` may be pieces.
    Backward: d_out is the gradient; d_rows is the gradient at `index`.
    """
    is_observed = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if is_observed or shares_memory(out, keep) or shares_memory(out, rows):
        ran("add_rows_out_of_place")
        return pieces_like(own_rows(out).index_add(0, index, rows), out)
    ran("add_rows_in_place")
    # Own rows stay where they are, so the type of `out` stays true: it is checked where
    # this is called, and a write through the cast to own rows would be refused.
    with unchecked(), _one_at_a_time, deterministic():
        out.index_add_(0, index, rows)
    return out


def shares_memory(x: Tensor, y: Tensor) -> bool:
    """Return whether both have one storage; tensors without memory count as sharing it."""
    if is_dispatched(x) or is_dispatched(y):
        return True
    with unchecked():
        return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


@contextmanager
def deterministic() -> Generator[None]:
    """Use deterministic algorithms inside, and restore what was set before."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
