"""Each fast path gives what the plain path gives: values and gradients, bit for bit.

The layer itself runs on ranks, in whole numbers of float64 where sums are in another order,
with the same weights and tokens, once plainly and once by fast paths. The recorder shows
which paths ran, the ledger what was sent.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from placements import assert_type, ledger, split, typecheck
from placements.testing import run_ranks
from spmd_moe import MoEConfig, Parallel
from spmd_moe.paths.recorder import recording
from spmd_moe.paths.regroup import PadGroups
from tests.support.moe import Case, build, meshes

CONFIG = MoEConfig(dim=4, hidden_dim=2, num_experts=4, top_k=2, num_shared_experts=1)
TURNS = replace(CONFIG, round_robin=True)
EP2 = Parallel(tp=2, ep=2, sequence_parallel=True)
FAST = {"equal_tokens": True, "max_padding": math.inf}


@dataclass
class Ran:
    values: dict[str, Tensor]
    paths: dict[str, int]
    sent: list[tuple[str, str, int, bool]]  # axis, kind, bytes, backward?


def once(case: Case, multiple: int = 0, checked: bool = False) -> Ran:
    """One step on this rank; `multiple` pads groups as quantised dispatch does."""
    with meshes(case.parallel) as (dense, sparse):
        moe = build(case, sparse)
        if multiple:
            moe.dispatcher = replace(moe.dispatcher, regrouper=PadGroups(multiple))  # type: ignore[type-var]
        x, weights = (
            split(t, moe.layout.input, dense)[dist.get_rank()] for t in case.tensors()
        )
        x = x.clone().requires_grad_()
        with recording() as recorder, ledger() as record:
            y = moe(x, seq_len=case.seq_len)
            (y * weights).sum().backward()
        assert x.grad is not None
        values = {"y": y.detach(), "d_x": x.grad}
        for name, parameter in moe.named_parameters():
            assert parameter.grad is not None, name
            values[name] = parameter.grad
        sent = [(e.axis, e.kind, e.nbytes, e.backward) for e in record.entries]
        if checked:
            with typecheck():
                typed_x = assert_type(x.detach().clone(), moe.input_types(case.seq_len))
                again = moe(typed_x, seq_len=case.seq_len)
            torch.testing.assert_close(again, y)
        return Ran(values, recorder.counts(), sent)


def both(plain: Case, fast: Case, multiple: int = 0) -> tuple[Ran, Ran]:
    return once(plain), once(fast, multiple)


def compared(plain: Case, fast: Case, multiple: int = 0, exact: bool = True) -> list[Ran]:
    """Run both on all ranks; equal bit for bit, or to the last digits of float64."""
    mesh = plain.parallel.dense_mesh()
    results = run_ranks(mesh, both, plain, fast, multiple)
    for slow, quick in results:
        assert slow.values.keys() == quick.values.keys()
        for name, value in slow.values.items():
            if exact:
                assert torch.equal(value, quick.values[name]), name
            else:
                torch.testing.assert_close(quick.values[name], value, msg=name)
    return [quick for _, quick in results]


def cases(config: MoEConfig, parallel: Parallel, **how: object) -> tuple[Case, Case]:
    case = Case(parallel, config, batch=1, seq_len=4 * parallel.tp * parallel.cp)
    return case, replace(case, parallel=replace(parallel, **how))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "parallel",
    [
        EP2,
        Parallel(tp=2, ep=2),
        Parallel(dp=2, ep=2),
        Parallel(dp=2, tp=2, ep=4, sequence_parallel=True),
        Parallel(dp=2, tp=2, ep=2, etp=2, sequence_parallel=True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_robin_is_known_without_communication(
    parallel: Parallel, dtype: torch.dtype
) -> None:
    plain, fast = cases(TURNS, parallel, equal_tokens=True)
    plain, fast = (replace(case, dtype=dtype) for case in (plain, fast))
    for quick in compared(plain, fast, exact=parallel.ep == 2 and dtype == torch.float32):
        assert quick.paths["round_robin_dispatch"] == 1
        assert quick.paths["cached_order"] == 1
        over_ep = Counter(kind for axis, kind, _, _ in quick.sent if axis == "ep")
        assert over_ep == {"all-to-all": 4}  # rows out and back, forward and backward
