"""Type-check the layer for a mesh of any size, in one process, on meta tensors.

One forward, one backward and the sums of gradients, as rank 0 sees them: every op is
checked, nothing is sent and nothing is computed. Where data decides how many rows travel,
the rows are spread evenly over the experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from placements import (
    Mesh,
    Shard,
    assert_type,
    ledger,
    reduce_gradients,
    set_current_mesh,
    unchecked,
)
from placements._torch import storage_identity
from placements.runtime.ledger import Entry
from spmd_moe.checks.crossings import Crossing, Recorder, checked, ledger_of
from spmd_moe.config import MoEConfig, Parallel
from spmd_moe.layer import MoE
from spmd_moe.layouts import Types, configuration
from spmd_moe.meshes import make_sparse_mesh


@dataclass(frozen=True)
class Workload:
    """What the layer is given: `batch` sequences on every dp rank."""

    batch: int
    seq_len: int
    dtype: torch.dtype

    def global_shape(self, config: MoEConfig, parallel: Parallel) -> tuple[int, int, int]:
        return self.batch * parallel.dp, self.seq_len, config.dim


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank for this layer.

    `optimizer` is what torch.optim.AdamW keeps: two tensors like each parameter.
    `activations` are the tensors that autograd keeps from forward to backward, each
    memory once, parameters left out. The experts are computed as a GPU does it, by plain
    ops; on a CPU `ByExpert` keeps less.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Trace:
    """A checked step: what crossed, what was sent, what was kept."""

    parallel: Parallel
    crossings: list[Crossing]
    collectives: list[Entry]
    gradient_sums: list[Entry]
    memory: Memory

    @property
    def configuration(self) -> str:
        return configuration(self.parallel)

    @property
    def ranks(self) -> int:
        return self.parallel.num_ranks


def trace(config: MoEConfig, parallel: Parallel, work: Workload) -> Trace:
    """Trace one step; PlacementError if the layer does not type-check on this mesh."""
    recorder, saved = Recorder(), _Saved()
    dense = Mesh(parallel.dense_mesh())
    sparse = make_sparse_mesh(parallel, dense)
    with set_current_mesh(dense):
        with torch.device("meta"):
            moe = MoE(config, parallel, sparse_mesh=sparse).to(work.dtype)
        types = moe.input_types(work.seq_len)
        shape = (work.batch, _length_here(types, work.seq_len), config.dim)
        x = torch.empty(shape, dtype=work.dtype, device="meta", requires_grad=True)
        with ledger_of(recorder):
            with saved.watching(), checked(recorder):
                y: Tensor = moe(assert_type(x, types), seq_len=work.seq_len)
            torch.autograd.backward(y, torch.empty_like(y))
        with ledger() as sums:
            reduce_gradients(moe, meshes=(dense, sparse))
    return Trace(
        parallel, recorder.traced(), recorder.collectives, sums.entries,
        _memory(moe, saved),
    )  # fmt: skip


def _length_here(types: Types, seq_len: int) -> int:
    """Count the positions of the sequence on rank 0: cut over cp, then over tp."""
    for t in (types["cp"], types["tp"]):
        if isinstance(t, Shard) and t.extent is not None:
            seq_len = t.extent.local_size(0)
    return seq_len


class _Saved:
    """The memory that autograd keeps from forward to backward."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}

    def watching(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, lambda x: x)

    def _pack(self, x: Tensor) -> Tensor:
        with unchecked():
            storage = x.untyped_storage()
        self.storages[storage_identity(storage)] = storage
        return x


def _memory(moe: MoE, saved: _Saved) -> Memory:
    parameters = list(moe.parameters())
    own = {storage_identity(p.untyped_storage()) for p in parameters}
    size = sum(p.numel() * p.element_size() for p in parameters)
    kept = sum(s.nbytes() for key, s in saved.storages.items() if key not in own)
    return Memory(size, size, 2 * size, kept)
