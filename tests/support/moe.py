"""One training step of the layer, on ranks and by the one-device reference."""

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from placements import (
    Mesh,
    P,
    Shard,
    assert_type,
    join,
    ledger,
    reduce_gradients,
    set_current_mesh,
    split,
    typecheck,
)
from placements.runtime.tags import declarations
from placements.testing import device_mesh, run_ranks
from placements.testing.compare.one_device import TOLERANCE, check_value, largest
from placements.types.axis import print_types
from spmd_moe import MoE, MoEConfig, Parallel, reference_moe
from tests.support.printed import parse_types

CONFIG = MoEConfig(dim=8, hidden_dim=4, num_experts=4, top_k=2, num_shared_experts=1)

# Every configuration of the table on up to 8 ranks; dp, cp and tp all appear.
PARALLELS: tuple[Parallel, ...] = (
    Parallel(),
    Parallel(dp=2, ep=2),
    Parallel(tp=2, ep=2, sequence_parallel=True),
    Parallel(tp=2, ep=2),
    Parallel(tp=2, sequence_parallel=True),
    Parallel(tp=2),
    Parallel(dp=2, tp=2, ep=2, sequence_parallel=True),
    Parallel(cp=2, tp=2, ep=4, sequence_parallel=True),
    Parallel(dp=2, tp=2, ep=4),
    Parallel(cp=2, tp=2, ep=2),
    Parallel(tp=4, ep=2, sequence_parallel=True),
    Parallel(dp=2, tp=2, sequence_parallel=True),
    Parallel(cp=2, tp=2),
    Parallel(tp=4, sequence_parallel=True),
    Parallel(dp=2, tp=2, ep=2, etp=2, sequence_parallel=True),
    Parallel(cp=2, tp=2, ep=2, etp=2),
    Parallel(dp=2, cp=2, tp=2, ep=4, sequence_parallel=True),
    Parallel(dp=2, cp=2, tp=2, ep=2, etp=2, sequence_parallel=True),
)


@dataclass(frozen=True)
class Case:
    """What one step is about. `favoured` experts are chosen before all others."""

    parallel: Parallel
    config: MoEConfig = CONFIG
    batch: int = 2  # on each dp rank; 0 for (T, D) input
    seq_len: int = 5
    favoured: tuple[int, ...] = ()
    seed: int = 0
    dtype: torch.dtype = torch.float64
    checked: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the global input."""
        rows = (self.seq_len,) if self.batch == 0 else (self.batch, self.seq_len)
        return (rows[0] * self.parallel.dp, *rows[1:], self.config.dim)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """The global input, and the weights of the loss sum(y * weights)."""
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.shape, generator=generator, dtype=self.dtype)
        return x, torch.randn(self.shape, generator=generator, dtype=self.dtype)

    def bias(self) -> Tensor:
        bias_E = torch.zeros(self.config.num_experts, dtype=self.dtype)
        bias_E[list(self.favoured)] = 1000.0
        return bias_E


@dataclass
class Step:
    """Everything that a step leaves behind, by rank or on one device."""

    y: Tensor
    d_x: Tensor
    gradients: dict[str, Tensor]
    counts_E: Tensor
    parameter_types: dict[str, str] = field(default_factory=dict)
    input_types: str = ""
    collectives: dict[tuple[str, str, bool], int] = field(default_factory=dict)  # backward?


def build(case: Case, sparse: Any = None) -> MoE:
    moe = MoE(case.config, case.parallel, sparse_mesh=sparse, seed=case.seed)
    moe = moe.to(case.dtype)
    moe.router.balance.expert_bias_E.copy_(case.bias())
    return moe


@functools.lru_cache(maxsize=64)
def on_one_device(case: Case) -> Step:
    """The reference: a loop over tokens, on the global weights."""
    moe = build(replace(case, parallel=Parallel()))
    weights = {
        name: value.detach().clone().requires_grad_(name.rsplit(".")[-1].startswith("w"))
        for name, value in moe.state_dict().items()
    }
    x, loss_weights = case.tensors()
    y = reference_moe(x.requires_grad_(), weights, case.config)
    (y * loss_weights).sum().backward()
    gradients = {
        name: torch.zeros_like(w) if w.grad is None else w.grad
        for name, w in weights.items()
        if w.requires_grad
    }
    d_x = torch.zeros_like(x) if x.grad is None else x.grad
    return Step(y.detach(), d_x, gradients, torch.empty(0))


@contextmanager
def meshes(parallel: Parallel) -> Iterator[tuple[Any, Any]]:
    """The dense mesh made current, and the sparse one; none for one rank alone."""
    if not dist.is_initialized():
        with set_current_mesh({}):
            yield None, None
        return
    dense, sparse = (
        device_mesh(parallel.dense_mesh()), device_mesh(parallel.sparse_mesh())
    )  # fmt: skip
    with set_current_mesh(dense):
        yield dense, sparse


def on_this_rank(case: Case, checking: Any = None) -> Step:
    """The step as a training loop writes it; `checking` is a block in place of ours."""
    with meshes(case.parallel) as (dense, sparse), ledger() as record:
        moe = build(case, sparse)
        types = moe.input_types(case.seq_len)
        mesh, rank = (dense or Mesh({})), (dist.get_rank() if dense else 0)
        x, loss_weights = (split(t, moe.layout.input, mesh)[rank] for t in case.tensors())
        x.requires_grad_()
        summed = {a: P if isinstance(t, Shard) else t for a, t in moe.layout.output.items()}
        with checking or (typecheck() if case.checked else nullcontext()):
            assert_type(x, types)
            assert_type(loss_weights, types)
            y = moe(x, seq_len=case.seq_len)
            assert_type((y * loss_weights).sum(), summed).backward()
        sent = Counter((entry.axis, entry.kind, entry.backward) for entry in record.entries)
        gradients_before = {name: p.grad is not None for name, p in moe.named_parameters()}
        reduce_gradients(moe, meshes=(dense, sparse) if dense else None)
    assert all(gradients_before.values()), gradients_before
    assert x.grad is not None
    return Step(
        y.detach(), x.grad,
        {name: _gradient(p) for name, p in moe.named_parameters()},
        moe.router.balance.counts_E.clone(),
        {name: print_types(types) for name, types in declared_types(moe)},
        print_types(moe.layout.input), dict(sent),
    )  # fmt: skip


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()


def declared_types(moe: MoE) -> Iterator[tuple[str, Any]]:
    for prefix, module in moe.named_modules():
        for name, types in declarations(module).items():
            yield f"{prefix}.{name}", types


def on_ranks(case: Case, backend: Any = "sim") -> list[Step]:
    if case.parallel.num_ranks == 1:
        return [on_this_rank(case)]
    return run_ranks(case.parallel.dense_mesh(), on_this_rank, case, backend=backend)


def whole(steps: list[Step], case: Case) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, d_x and gradients of all ranks as one device would have them."""
    dense, sparse = case.parallel.dense_mesh(), case.parallel.sparse_mesh()
    types = parse_types(steps[0].input_types)
    y, d_x = (join([getattr(s, n) for s in steps], types, dense) for n in ("y", "d_x"))
    gradients: dict[str, Tensor] = {}
    for name in steps[0].gradients:
        said = parse_types(steps[0].parameter_types[name])
        mesh = dense if "tp" in said else sparse
        gradients[name] = join([s.gradients[name] for s in steps], said, mesh)
    return y, d_x, gradients


def assert_equals_one_device(
    case: Case, steps: list[Step], rtol: float = 2 * TOLERANCE
) -> None:
    """Output, d_x and every gradient, on every rank; `rtol` is of the largest value."""
    expected = on_one_device(case)
    y, d_x, gradients = whole(steps, case)
    assert gradients.keys() == expected.gradients.keys()
    found = {"y": y, "d_x": d_x, **gradients}
    wanted = {"y": expected.y, "d_x": expected.d_x, **expected.gradients}
    for name, value in wanted.items():
        # Terms of size one cancel where one expert gets each token: its gate is one.
        # An element is no larger than the unit, so this allows at most `rtol` units.
        unit = max(largest(value), 0.05)
        check_value(name, found[name], value, unit=unit, tolerance=rtol / 2)
