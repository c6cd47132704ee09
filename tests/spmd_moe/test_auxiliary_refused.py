"""Published ways to get an auxiliary loss wrong, and what refuses each of them."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from placements import (
    I,
    P,
    PlacementError,
    R,
    all_reduce,
    assert_type,
    current_mesh,
    redistribute,
    set_current_mesh,
    split,
    typecheck,
)
from placements.testing import run_ranks
from spmd_moe import (
    MoE,
    Parallel,
    Routed,
    keep_routings,
    load_balance_loss,
    sequence_balance_loss,
    total_counts,
    z_loss,
)
from spmd_moe.auxiliary import KeepsRoutings
from spmd_moe.route import Routing
from tests.support.moe import CONFIG, Case, build, meshes

SHARED = Parallel(dp=2, tp=2)  # both tp ranks route the same tokens
OWN = Parallel(dp=2, tp=2, ep=2, sequence_parallel=True)  # each has tokens of its own


def probabilities(routed: Routed) -> Tensor:
    assert routed.routing.logits_TE is not None
    return routed.routing.logits_TE.softmax(1)


def summed(x: Tensor, *axes: str, dst: Any = R) -> Tensor:
    for axis in axes:
        x = all_reduce(x, axis, src=P, dst=dst)
    return x


def averaged_per_rank(routed: Routed, main: Tensor) -> Tensor:
    """The mean over this rank's tokens, which ranks have unequally many of."""
    mean_E = probabilities(routed).mean(0)
    counts_E = summed(routed.routing.counts_E, "dp", "tp")
    return main + summed((mean_E * counts_E).sum(), "dp", "tp", dst=I)


def local_fractions(routed: Routed, main: Tensor) -> Tensor:
    """This rank's counts times this rank's probabilities, then summed over ranks."""
    share_E, counts_E = probabilities(routed).sum(0), routed.routing.counts_E
    aux = (share_E * counts_E).sum()
    return main + summed(aux, "dp", "tp", dst=I)


def fractions_of_dp_alone(routed: Routed, main: Tensor) -> Tensor:
    """Counts are summed over dp; that tp cuts tokens as well is forgotten."""
    share_E = probabilities(routed).sum(0)
    counts_E = summed(routed.routing.counts_E, "dp")
    aux = (share_E * counts_E).sum()
    return main + summed(aux, "dp", "tp", dst=I)


def scaled_by_dp(routed: Routed, main: Tensor) -> Tensor:
    """A loss that all ranks have, each of which differentiates all of it."""
    share_E = probabilities(routed).sum(0)
    counts_E = summed(routed.routing.counts_E, "dp", "tp")
    return summed((share_E * counts_E).sum(), "dp", "tp")


def average_of_ranks(routed: Routed, main: Tensor) -> Tensor:
    """What a wrapper does that averages over dp."""
    aux = probabilities(routed).square().sum()
    mesh = current_mesh()
    assert mesh is not None and mesh.device_mesh is not None
    dist.all_reduce(aux, op=dist.ReduceOp.AVG, group=mesh.device_mesh.get_group("dp"))
    return main + aux


def scaled_by_own_tokens(routed: Routed, main: Tensor) -> Tensor:
    """Multiplied by the number of this rank's tokens, to be divided by that of all."""
    own = routed.routing.counts_E.sum()
    aux = probabilities(routed).square().sum() * own
    return main + summed(aux, "dp", "tp", dst=I)


def divided_by_own_tokens(routed: Routed, main: Tensor) -> Tensor:
    probabilities_TE = probabilities(routed)
    aux = probabilities_TE.square().sum() / probabilities_TE.shape[0]
    return main + summed(aux, "dp", "tp", dst=I)


def every_tp_rank(routed: Routed, main: Tensor) -> Tensor:
    """Every tp rank differentiates the same loss of the same tokens."""
    return summed(probabilities(routed).square().sum(), "dp", dst=I)


def added_on_every_tp_rank(routed: Routed, main: Tensor) -> Tensor:
    aux = summed(probabilities(routed).square().sum(), "dp", dst=I)
    return main + aux


def summed_over_tp(routed: Routed, main: Tensor) -> Tensor:
    """The same tokens are summed once for each tp rank."""
    aux = probabilities(routed).square().sum()
    return main + summed(aux, "dp", "tp", dst=I)


def counts_of_this_rank(routed: Routed, main: Tensor) -> Tensor:
    return main + load_balance_loss(routed, counts_E=routed.routing.counts_E)


WRONG: list[tuple[Callable[[Routed, Tensor], Tensor], Parallel, str]] = [
    (averaged_per_rank, OWN, "this rank's count"),
    (local_fractions, OWN, "the product of two sums"),
    (local_fractions, SHARED, "the product of two sums"),
    (fractions_of_dp_alone, OWN, "the product of two sums"),
    (scaled_by_dp, OWN, "is Replicate on axis 'dp'"),
    (average_of_ranks, OWN, "reductions are sums"),
    (scaled_by_own_tokens, OWN, "the product of two sums"),
    (
        divided_by_own_tokens,
        OWN,
        "a divisor taken from a value that is still pending a sum",
    ),
    (every_tp_rank, SHARED, "is Replicate on axis 'tp'"),
    (added_on_every_tp_rank, SHARED, "Invariant mixes with nothing"),
    (summed_over_tp, SHARED, "is Replicate on axis 'tp', expected Partial"),
    (counts_of_this_rank, OWN, "load_balance_loss: counts_E is P on axis 'dp', expected R"),
]


def refusal(parallel: Parallel, wrong: Callable[[Routed, Tensor], Tensor]) -> str:
    case = Case(parallel)
    with meshes(parallel) as (dense, sparse):
        moe = build(case, sparse)
        x = split(case.tensors()[0], moe.layout.input, dense)[dist.get_rank()]
        with typecheck(), keep_routings(moe) as kept:
            assert_type(x, moe.input_types(case.seq_len))
            main = moe(x, seq_len=case.seq_len).square().sum()
            for axis in ("dp", "tp"):
                src = P if axis == "dp" or parallel.sequence_parallel else I
                main = redistribute(main, axis, src=src, dst=I)
            try:
                wrong(*kept, main).backward()
            except PlacementError as error:
                return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("wrong", "parallel", "reason"),
    WRONG,
    ids=[f"{w[0].__name__}-{w[1].ep}" for w in WRONG],
)
def test_a_published_mistake_is_refused(
    wrong: Callable[[Routed, Tensor], Tensor], parallel: Parallel, reason: str
) -> None:
    for message in run_ranks(parallel.dense_mesh(), refusal, parallel, wrong):
        assert re.search(reason, message), message


def routed_of(moe: MoE, *inputs: Tensor) -> list[Routed]:
    with keep_routings(moe) as kept:
        for x in inputs:
            moe(x, seq_len=x.shape[-2])
    return kept


def two_microbatches() -> tuple[MoE, Tensor, list[Tensor]]:
    x = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1)).double()
    return MoE(CONFIG).double(), x, [x[:2], x[2:]]


@pytest.mark.parametrize("loss", [load_balance_loss, sequence_balance_loss, z_loss])
def test_microbatches_are_not_averaged_but_put_together(
    loss: Callable[..., Tensor],
) -> None:
    """The mean of their losses is another loss; all at once or share by share is not."""
    moe, x, parts = two_microbatches()
    (whole,) = routed_of(moe, x)
    expected = loss(whole)
    expected.backward()
    assert moe.router.w_gate_ED.grad is not None
    gradient = moe.router.w_gate_ED.grad.clone()

    kept = routed_of(moe, *parts)
    mean = torch.stack([loss(one) for one in kept]).mean()
    assert (mean - expected).abs() > 1e-4
    torch.testing.assert_close(loss(*kept), expected, rtol=1e-13, atol=0)

    with torch.no_grad():
        moe.eval()
        counts_E = total_counts(*routed_of(moe, *parts))
    moe.zero_grad()
    for part in parts:  # as gradients are accumulated
        loss(*routed_of(moe, part), counts_E=counts_E).backward()
    torch.testing.assert_close(moe.router.w_gate_ED.grad, gradient, rtol=1e-12, atol=1e-14)


def test_layers_are_not_put_together() -> None:
    first, second = MoE(CONFIG), MoE(CONFIG, seed=1)
    x = torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match="of different layers"):
        load_balance_loss(*routed_of(first, x), *routed_of(second, x))
    with pytest.raises(ValueError, match="of 5 and of 4 tokens"):
        sequence_balance_loss(*routed_of(first, x, x[:, 1:]))
    with pytest.raises(ValueError, match="one forward at least"):
        z_loss()


@pytest.mark.parametrize("loss", [load_balance_loss, sequence_balance_loss, z_loss])
def test_what_is_no_routing_or_no_count_is_refused_in_words(loss: Any) -> None:
    routings = routed_of(MoE(CONFIG), torch.randn(2, 5, 8))
    for wrong in (routings, routings[0].routing):  # the list itself; what a router returns
        with pytest.raises(TypeError, match=r"expected what `keep_routings` kept"):
            loss(wrong)
    with pytest.raises(ValueError, match="one count for each of the"):
        loss(*routings, counts_E=torch.ones(CONFIG.num_experts + 1, dtype=torch.int64))


def test_tokens_without_sequences_have_no_loss_by_sequence() -> None:
    moe = MoE(CONFIG)
    kept = routed_of(moe, torch.randn(5, 8))
    assert torch.isfinite(load_balance_loss(*kept))
    with pytest.raises(ValueError, match=r"call it with \(B, L, D\)"):
        sequence_balance_loss(*kept)


def test_a_routing_without_logits_has_no_loss() -> None:
    moe = MoE(CONFIG)
    (one,) = routed_of(moe, torch.randn(2, 5, 8))
    mine = Routing(one.routing.gates_TK, one.routing.expert_ids_TK, one.routing.counts_E)
    with pytest.raises(ValueError, match="must give them to its Routing"):
        z_loss(Routed(one.layer, mine, one.shape, one.seq_len, one.has_graph))


def test_a_module_without_layers_has_nothing_to_keep() -> None:
    with pytest.raises(ValueError, match="Linear has no MoE layer"):
        with keep_routings(torch.nn.Linear(2, 2)):
            pass


def test_nothing_is_kept_outside_of_the_block() -> None:
    moe, x, _ = two_microbatches()
    with keep_routings(moe) as outer:
        moe(x, seq_len=5)
        with keep_routings(moe) as inner:
            moe(x, seq_len=5)
    moe(x, seq_len=5)
    assert (len(outer), len(inner)) == (2, 1)
    assert moe.keepers == ()
    with pytest.raises(RuntimeError, match="mine"), keep_routings(moe):
        raise RuntimeError("mine")
    assert moe.keepers == KeepsRoutings.keepers == ()


def gradient_of(
    moe: MoE, x: Tensor, run: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
) -> Tensor:
    """Of the main loss and a balance loss, where the layer is run by `run`."""
    moe.zero_grad()
    with keep_routings(moe) as kept:
        y = run(lambda x: moe(x, seq_len=5), x)
        (y.square().sum() + 10 * load_balance_loss(*kept)).backward()
    assert len(kept) == 1 and moe.router.w_gate_ED.grad is not None
    return moe.router.w_gate_ED.grad


@pytest.mark.parametrize("checked", [False, True])
def test_a_checkpointed_layer_has_the_gradient_of_a_plain_one(checked: bool) -> None:
    moe, x, _ = two_microbatches()
    x.requires_grad_()
    expected = gradient_of(moe, x, lambda f, x: f(x))

    def again(f: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        return checkpoint(f, x, use_reentrant=False)

    with set_current_mesh({}):
        if checked:
            with typecheck():
                assert_type(x, {})
                found = gradient_of(moe, x, again)
        else:
            found = gradient_of(moe, x, again)
    assert torch.equal(found, expected)


def test_reentrant_checkpointing_is_refused_outside_and_right_inside() -> None:
    moe, x, _ = two_microbatches()
    x.requires_grad_()
    expected = gradient_of(moe, x, lambda f, x: f(x))

    def again(f: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        return checkpoint(f, x, use_reentrant=True)

    with pytest.raises(ValueError, match="use_reentrant=False"):
        gradient_of(moe, x, again)

    def with_loss(x: Tensor) -> tuple[Tensor, Tensor]:
        with keep_routings(moe) as kept:
            y = moe(x, seq_len=5)
        return y, load_balance_loss(*kept)

    moe.zero_grad()
    y, aux = checkpoint(with_loss, x, use_reentrant=True)  # type: ignore[misc]
    (y.square().sum() + 10 * aux).backward()
    assert moe.router.w_gate_ED.grad is not None
    assert torch.equal(moe.router.w_gate_ED.grad, expected)
