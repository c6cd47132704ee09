"""Run the layer on simulated ranks, and compare it with the layer on one device.

Every rank runs the code that a cluster runs, under `verify()`, in float64. Outputs and
gradients are joined as their types say and compared with `reference_moe`, a loop over
tokens that shares no code with the layer.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from placements import (
    AxisType,
    Mesh,
    as_mesh,
    assert_type,
    join,
    ledger,
    reduce_gradients,
    set_current_mesh,
    split,
    verify,
)
from placements.parameters.held import trained_parameters
from placements.runtime.ledger import Entry
from spmd_moe.checks.trace import Workload
from spmd_moe.config import MoEConfig, Parallel
from spmd_moe.layer import MoE
from spmd_moe.layouts import configuration, layout
from spmd_moe.reference import reference_moe

OUTPUT, INPUT = "output", "x"


@dataclass(frozen=True)
class Simulated:
    """The largest differences from one device, and what rank 0 sent."""

    config: MoEConfig
    parallel: Parallel
    work: Workload
    differences: dict[str, float]  # of the output, of the gradients of x and parameters
    sent: list[Entry]
    gradient_sums: list[Entry]
    # On each rank, how many rows each expert computed; None for an expert held elsewhere.
    rows: list[list[int | None]]

    tolerance: float

    @property
    def agrees(self) -> bool:
        return all(found <= self.tolerance for found in self.differences.values())


@dataclass(frozen=True)
class _RankResult:
    output: Tensor
    gradients: dict[str, Tensor]
    types: dict[str, tuple[dict[str, AxisType], Mesh]]  # of parameters, and their mesh
    sent: list[Entry]
    gradient_sums: list[Entry]
    rows: list[int | None]


def simulate(config: MoEConfig, parallel: Parallel, work: Workload) -> Simulated:
    """Run and compare; RankFailure if a rank raises or its values belie their types."""
    # Late: the simulator changes torch.
    from placements.testing import run_ranks
    from placements.testing.compare.one_device import TOLERANCE, difference, largest

    shape = work.global_shape(config, parallel)
    generator = torch.Generator().manual_seed(0)
    x, weights = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    ranks = run_ranks(
        parallel.dense_mesh(), _on_this_rank, config, parallel, x, weights, work.seq_len
    )
    wanted = _on_one_device(config, x, weights)
    found = _joined(ranks, parallel)
    # The largest value says how large the terms of a sum are, unless they cancel: where one
    # expert gets each token its gate is one, and the router's gradient is rounding alone.
    differences = {
        name: difference(found[name], value, unit=max(largest(value), 0.05))
        for name, value in wanted.items()
    }
    first = ranks[0]
    return Simulated(
        config, parallel, work, differences, first.sent, first.gradient_sums,
        [rank.rows for rank in ranks], TOLERANCE,
    )  # fmt: skip


def _on_this_rank(
    config: MoEConfig, parallel: Parallel, x: Tensor, weights: Tensor, seq_len: int
) -> _RankResult:
    """Run a training step, but for the optimizer."""
    from placements.testing import device_mesh

    dense = device_mesh(parallel.dense_mesh())
    sparse = device_mesh(parallel.sparse_mesh())
    with set_current_mesh(dense), ledger() as record:
        moe = MoE(config, parallel, sparse_mesh=sparse).double()
        x, weights = (
            split(t, moe.layout.input, dense)[dist.get_rank()] for t in (x, weights)
        )
        types = moe.input_types(seq_len)
        x.requires_grad_()
        counted: list[Tensor] = []
        moe.experts.register_forward_pre_hook(lambda _, given: counted.append(given[1]))
        with verify(moe):
            y = moe(assert_type(x, types), seq_len=seq_len)
            loss = (y * assert_type(weights, types)).sum()
            torch.autograd.backward(loss)
            count = len(record.entries)
            reduce_gradients(moe, meshes=(dense, sparse))
    meshes = as_mesh(dense), as_mesh(sparse)
    held = trained_parameters("simulate", moe, meshes)
    gradients = {INPUT: x.grad, **{one.name: one.tensor.grad for one in held}}
    return _RankResult(
        y.detach(),
        {name: grad for name, grad in gradients.items() if grad is not None},
        {one.name: (dict(one.type), Mesh(one.type.mesh.sizes)) for one in held},
        record.entries[:count],
        record.entries[count:],
        _by_expert([int(n) for n in counted[0]], config, as_mesh(sparse)),
    )


def _by_expert(counts: list[int], config: MoEConfig, sparse: Mesh) -> list[int | None]:
    """Put the rows of the experts that are here to their places among all experts."""
    first = len(counts) * sparse.coordinate.get("ep", 0)
    found: list[int | None] = [None] * config.num_experts
    found[first : first + len(counts)] = counts
    return found


def _on_one_device(config: MoEConfig, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    moe = MoE(config).double()
    trained = {name for name, _ in moe.named_parameters()}
    state = {
        name: value.detach().clone().requires_grad_(name in trained)
        for name, value in moe.state_dict().items()
    }
    x = x.clone().requires_grad_()
    y = reference_moe(x, state, config)
    torch.autograd.backward((y * weights).sum())
    leaves = {INPUT: x, **{name: state[name] for name in sorted(trained)}}
    gradients = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in leaves.items()
    }
    return {OUTPUT: y.detach(), **gradients}


def _joined(ranks: list[_RankResult], parallel: Parallel) -> dict[str, Tensor]:
    """Join what all ranks hold into what one device would hold."""
    types, dense = layout(configuration(parallel)).input, Mesh(parallel.dense_mesh())
    found = {
        OUTPUT: join([rank.output for rank in ranks], types, dense),
        INPUT: join([rank.gradients[INPUT] for rank in ranks], types, dense),
    }
    for name, (said, mesh) in ranks[0].types.items():
        found[name] = join([rank.gradients[name] for rank in ranks], said, mesh)
    return found
