"""Auxiliary losses are those of one device under every split, and so are gradients."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from placements import (
    I,
    Mesh,
    P,
    Shard,
    assert_type,
    join,
    redistribute,
    reduce_gradients,
    split,
    typecheck,
)
from placements.testing import run_ranks
from placements.testing.compare.one_device import TOLERANCE, check_value, largest
from placements.types.axis import print_types
from spmd_moe import (
    MoE,
    Parallel,
    keep_routings,
    load_balance_loss,
    reference_moe,
    sequence_balance_loss,
    z_loss,
)
from spmd_moe.layouts import CONFIGURATIONS, configuration
from tests.support.moe import CONFIG, PARALLELS, Case, build, declared_types, meshes
from tests.support.printed import parse_types

LOSSES: dict[str, Callable[..., Tensor]] = {
    "load balance": load_balance_loss,
    "by sequence": sequence_balance_loss,
    "z": z_loss,
}
# Large, so that a wrong gradient of any of them is a large part of the gradient.
COEFFICIENTS = {"load balance": 30.0, "by sequence": 20.0, "z": 2.0}


@dataclass
class Found:
    losses: dict[str, Tensor]
    d_x: Tensor
    gradients: dict[str, Tensor]
    types: dict[str, str]
    input_types: str


def of_tokens(x: Tensor, weights: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    """The losses of (B, L, D) by loops over sequences, tokens and experts."""
    config, experts = case.config, range(case.config.num_experts)
    logits = [[x_D @ weights["router.w_gate_ED"].T for x_D in x_LD] for x_LD in x]
    bias_E = weights["router.balance.expert_bias_E"]

    def scores(logits_E: Tensor) -> Tensor:
        is_softmax = config.score_function == "softmax"
        return logits_E.softmax(0) if is_softmax else logits_E.sigmoid()

    def balance(tokens: list[Tensor]) -> Tensor:
        count, mean = [0] * len(experts), [torch.zeros((), dtype=x.dtype)] * len(experts)
        for logits_E in tokens:
            scores_E = scores(logits_E)
            ranked = sorted(experts, key=(scores_E.detach() + bias_E).tolist().__getitem__)
            for e in ranked[-config.top_k :]:
                count[e] += 1
            mean = [m + scores_E[e] / scores_E.sum() for e, m in enumerate(mean)]
        total = sum(c * m for c, m in zip(count, mean, strict=True))
        return torch.as_tensor(total * len(experts) / (config.top_k * len(tokens) ** 2))

    every = [logits_E for sequence in logits for logits_E in sequence]
    return {
        "load balance": balance(every),
        "by sequence": torch.stack([balance(tokens) for tokens in logits]).mean(),
        "z": torch.stack([e.logsumexp(0) ** 2 for e in every]).mean(),
    }


@functools.lru_cache(maxsize=64)
def on_one_device(case: Case) -> Found:
    moe = build(replace(case, parallel=Parallel()))
    weights = {
        name: value.detach().clone().requires_grad_(name.rsplit(".")[-1].startswith("w"))
        for name, value in moe.state_dict().items()
    }
    x, loss_weights = case.tensors()
    y = reference_moe(x.requires_grad_(), weights, case.config)
    losses = of_tokens(x, weights, case)
    total = (y * loss_weights).sum()
    for name, loss in losses.items():
        total = total + COEFFICIENTS[name] * loss
    total.backward()
    assert x.grad is not None
    gradients = {n: w.grad for n, w in weights.items() if w.grad is not None}
    return Found({n: v.detach() for n, v in losses.items()}, x.grad, gradients, {}, "")


def whole(loss: Tensor, moe: MoE, mesh: Mesh) -> Tensor:
    """A sum over the output -> Invariant."""
    for axis, t in moe.layout.output.items():
        if axis in mesh.sizes:
            loss = redistribute(loss, axis, src=P if isinstance(t, Shard) else I, dst=I)
    return loss


def on_this_rank(case: Case) -> Found:
    with meshes(case.parallel) as (dense, sparse):
        moe = build(case, sparse)
        mesh, rank = (dense or Mesh({})), (dist.get_rank() if dense else 0)
        x, loss_weights = (split(t, moe.layout.input, mesh)[rank] for t in case.tensors())
        x.requires_grad_()
        with typecheck() if case.checked else nullcontext(), keep_routings(moe) as kept:
            types = moe.input_types(case.seq_len)
            assert_type(x, types)
            assert_type(loss_weights, types)
            y = moe(x, seq_len=case.seq_len)
            losses = {name: loss(*kept) for name, loss in LOSSES.items()}
            total = whole((y * loss_weights).sum(), moe, moe.meshes[0])
            for name, loss in losses.items():
                total = total + COEFFICIENTS[name] * loss
            total.backward()
        assert len(kept) == 1
        reduce_gradients(moe, meshes=moe.meshes)
    assert x.grad is not None
    return Found(
        {n: v.detach() for n, v in losses.items()},
        x.grad,
        {n: p.grad for n, p in moe.named_parameters() if p.grad is not None},
        {name: print_types(said) for name, said in declared_types(moe)},
        print_types(moe.layout.input),
    )


def several(cases: list[Case]) -> list[Found]:
    return [on_this_rank(case) for case in cases]


def assert_equal(case: Case, ranks: list[Found]) -> None:
    expected = on_one_device(case)
    dense, sparse = case.parallel.dense_mesh(), case.parallel.sparse_mesh()
    for rank in ranks:
        for name, value in expected.losses.items():
            torch.testing.assert_close(rank.losses[name], value, rtol=1e-13, atol=0)
    d_x = join([r.d_x for r in ranks], parse_types(ranks[0].input_types), dense)
    check_value("d_x", d_x, expected.d_x, unit=largest(expected.d_x), tolerance=TOLERANCE)
    for name, value in expected.gradients.items():
        said = parse_types(ranks[0].types[name])
        mesh = dense if "tp" in said else sparse
        found = join([r.gradients[name] for r in ranks], said, mesh)
        check_value(name, found, value, unit=largest(value), tolerance=TOLERANCE)


def case_of(number: int, parallel: Parallel) -> Case:
    """Every second one with softmax, unchecked, with three sequences, or an odd length."""
    function = ("sigmoid", "softmax")[number % 2]
    return Case(
        parallel,
        replace(CONFIG, score_function=function),
        batch=2 + number // 2 % 2,
        seq_len=(5, 7, 1)[number % 3],
        checked=number % 4 != 3,
        seed=number,
    )


CASES = [case_of(number, parallel) for number, parallel in enumerate(PARALLELS)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.parallel))
def test_losses_and_gradients_are_those_of_one_device(case: Case) -> None:
    one = case.parallel.num_ranks == 1
    mesh = case.parallel.dense_mesh()
    ranks = [on_this_rank(case)] if one else run_ranks(mesh, on_this_rank, case)
    assert_equal(case, ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_they_are_on_real_processes(ranks: int) -> None:
    cases = [case for case in CASES if case.parallel.num_ranks == ranks]
    results = run_ranks(ranks, several, cases, backend="gloo")
    for k, case in enumerate(cases):
        assert_equal(case, [rank[k] for rank in results])
    if ranks == 4:
        assert {configuration(case.parallel) for case in cases} == set(CONFIGURATIONS)
