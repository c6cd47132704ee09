"""C1 and C7 for the peers: a gradient is one rank's share, or is lost.

In DTensor the bug is made where a region is left or entered: `to_local()` takes the
gradient for complete unless it is told otherwise.
"""

# torch does not type `backward` and the collectives:
# pyright: reportUnknownMemberType=false

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn.functional import silu

from placements import (
    I,
    P,
    R,
    S,
    V,
    all_gather,
    all_reduce,
    assert_type,
    axis_rank,
    convert,
    reinterpret,
)
from placements.testing import device_mesh
from spmd_moe.bugs.peers.words import from_local, locally, placed
from spmd_moe.bugs.programs.c01_gradient_never_reduced import (
    EXPERT_EDF,
    GATE_D1,
    ROUTER_DE,
    ROWS_ECD,
    W1_EDF,
    W2_EFD,
    W_DF,
    X_TD,
)
from spmd_moe.bugs.record import Results, mine, numbers

experimental: Any = importlib.import_module("torch.distributed.tensor.experimental")


def scored_experts(grad_of_scores: Any) -> Results:
    x_TD, w_DF = placed(X_TD, {"tp": R}), placed(W_DF, {"tp": S(1)})
    gate_D1 = placed(GATE_D1, {"tp": R}, grad=True)
    scores_T1 = (x_TD @ gate_D1).to_local(grad_placements=grad_of_scores)
    y_TF = from_local((x_TD.to_local() @ w_DF.to_local()) * scores_T1, Shard(1))
    y_TF.sum().full_tensor().backward()
    return {"y_TF": y_TF, "gate.grad": gate_D1.grad}


class B01:
    @staticmethod
    def wrong_for_dtensor() -> Results:
        return scored_experts(None)

    @staticmethod
    def right_for_dtensor() -> Results:
        return scored_experts([Partial()])


def cut_experts(grad_of_rows: Any) -> Results:
    rows_ECD = placed(ROWS_ECD, {"tp": R}, grad=True)
    w1_EDF = placed(W1_EDF, {"tp": S(2)}, grad=True)
    w2_EFD = placed(W2_EFD, {"tp": S(1)}).to_local()
    used_ECD = rows_ECD.to_local(grad_placements=grad_of_rows)
    hidden_ECF = silu(torch.bmm(used_ECD, w1_EDF.to_local()))
    y_ECD = from_local(torch.bmm(hidden_ECF, w2_EFD), Partial()).redistribute(
        placements=[Replicate()]
    )
    y_ECD.square().sum().backward()
    return {"y_ECD": y_ECD, "rows.grad": rows_ECD.grad, "w1.grad": w1_EDF.grad}


class B02:
    @staticmethod
    def wrong_for_dtensor() -> Results:
        return cut_experts(None)

    @staticmethod
    def right_for_dtensor() -> Results:
        return cut_experts([Partial()])


Y_TD, W1, W2 = numbers(5, 4), numbers(4, 6, seed=1), numbers(6, 4, seed=2)


def experts(x_TD: Tensor, w1_DF: Tensor, w2_FD: Tensor) -> Tensor:
    return silu(x_TD @ w1_DF) @ w2_FD


def mapped_experts(grads: Any) -> Results:
    x_TD = placed(Y_TD, {"tp": R}, grad=True)
    w1_DF, w2_FD = placed(W1, {"tp": S(1)}), placed(W2, {"tp": S(0)})
    run = experimental.local_map(
        experts,
        out_placements=[Partial()],
        in_placements=([Replicate()], [Shard(1)], [Shard(0)]),
        in_grad_placements=grads,
        device_mesh=device_mesh(),
    )
    y_TD = run(x_TD, w1_DF, w2_FD).redistribute(placements=[Replicate()])
    y_TD.square().sum().backward()
    return {"y_TD": y_TD, "x.grad": x_TD.grad}


class B03:
    # That a gradient is as the value means Invariant, in the types of spmd_types.
    @staticmethod
    def wrong_for_peers() -> Results:
        x_TD = mine(Y_TD, {"tp": I}, grad=True)
        w1_DF, w2_FD = mine(W1, {"tp": S(1)}), mine(W2, {"tp": S(0)})
        y_TD = all_reduce(experts(x_TD, w1_DF, w2_FD), "tp", src=P, dst=I)
        y_TD.square().sum().backward()
        return {"y_TD": y_TD, "x.grad": x_TD.grad}

    @staticmethod
    def right_for_peers() -> Results:
        x_TD = mine(Y_TD, {"tp": I}, grad=True)
        w1_DF, w2_FD = mine(W1, {"tp": S(1)}), mine(W2, {"tp": S(0)})
        used_TD = convert(x_TD, "tp", src=I, dst=R)
        y_TD = all_reduce(experts(used_TD, w1_DF, w2_FD), "tp", src=P, dst=I)
        y_TD.square().sum().backward()
        return {"y_TD": y_TD, "x.grad": x_TD.grad}

    @staticmethod
    def wrong_for_dtensor() -> Results:
        return mapped_experts(None)

    @staticmethod
    def right_for_dtensor() -> Results:
        return mapped_experts(([Partial()], [Shard(1)], [Shard(0)]))


BATCH_TD, NORM_D, GATE_DE = numbers(8, 4, seed=3), numbers(4, seed=4), numbers(4, 3, seed=5)


def routed(flagged: tuple[str, ...]) -> Results:
    """The weights are the wrapper's to reduce, hence Replicate; it reads the flags."""
    x_TD = mine(BATCH_TD, {"dp": S(0), "tp": S(0)})
    weights = {
        "norm": mine(NORM_D, {"dp": R, "tp": R}, grad=True),
        "gate": mine(GATE_DE, {"dp": R, "tp": R}, grad=True),
    }
    loss = ((x_TD * weights["norm"]) @ weights["gate"]).square().sum()
    loss = all_reduce(loss, "dp", src=P, dst=I)
    all_reduce(loss, "tp", src=P, dst=I).backward()
    found: Results = {}
    for name, weight in weights.items():
        assert weight.grad is not None
        grad = assert_type(weight.grad, {"dp": P, "tp": P})
        grad = all_reduce(grad, "dp", src=P, dst=R)
        if name in flagged:
            grad = all_reduce(grad, "tp", src=P, dst=R)
        found[f"{name}.grad"] = grad
    return found


def routed_in_dtensor(grad_of_gate: Any) -> Results:
    x_TD = placed(BATCH_TD, {"dp": S(0), "tp": S(0)})
    norm_D = placed(NORM_D, {"dp": R, "tp": R}, grad=True)
    gate_DE = placed(GATE_DE, {"dp": R, "tp": R}, grad=True)
    used_DE = gate_DE.to_local(grad_placements=grad_of_gate)
    logits_TE = from_local((x_TD * norm_D).to_local() @ used_DE, Shard(0), Shard(0))
    logits_TE.square().sum().full_tensor().backward()
    return {"norm.grad": norm_D.grad, "gate.grad": gate_DE.grad}


class B06:
    @staticmethod
    def wrong_for_peers() -> Results:
        return routed(("norm",))

    @staticmethod
    def right_for_peers() -> Results:
        return routed(("norm", "gate"))

    @staticmethod
    def wrong_for_dtensor() -> Results:
        return routed_in_dtensor([Partial(), Replicate()])

    @staticmethod
    def right_for_dtensor() -> Results:
        return routed_in_dtensor([Partial(), Partial()])


OWN_GDF = EXPERT_EDF.view(2, 3, 4, 2)


def masked(x_TD: Tensor, scores_TE: Tensor, w_GDF: Tensor) -> Tensor:
    """What this rank's experts add to the output."""
    first = axis_rank("ep") * 3
    not_mine_E = torch.arange(6) // 3 != axis_rank("ep")
    scores_TG = scores_TE.masked_fill(not_mine_E, 0)[:, first : first + 3]
    return torch.einsum("tg,td,gdf->tf", scores_TG, x_TD, w_GDF)


def summed(x_TD: Tensor, scores_TE: Tensor, w_GDF: Tensor) -> Tensor:
    def body() -> Tensor:
        return reinterpret(masked(x_TD, scores_TE, w_GDF), "ep", src=V, dst=P)

    return all_reduce(locally(body, {"ep": P}), "ep", src=P, dst=I)


def masked_in_dtensor(grad_of_scores: Any) -> Results:
    x_TD = placed(X_TD, {"ep": R})
    router_DE = placed(ROUTER_DE, {"ep": R}, grad=True)
    w_GDF = placed(EXPERT_EDF, {"ep": S(0)}).to_local()
    scores_TE = (x_TD @ router_DE).to_local(grad_placements=grad_of_scores)
    y_TF = from_local(masked(x_TD.to_local(), scores_TE, w_GDF), Partial())
    y_TF = y_TF.redistribute(placements=[Replicate()])
    y_TF.square().sum().backward()
    return {"y_TF": y_TF, "router.grad": router_DE.grad}


class B07:
    @staticmethod
    def wrong_for_peers() -> Results:
        x_TD, w_GDF = mine(X_TD, {"ep": I}), mine(OWN_GDF, {"ep": V})
        router_DE = mine(ROUTER_DE, {"ep": I}, grad=True)
        used_TD = convert(x_TD, "ep", src=I, dst=R)
        y_TF = summed(used_TD, x_TD @ router_DE, w_GDF)
        y_TF.square().sum().backward()
        return {"y_TF": y_TF, "router.grad": router_DE.grad}

    @staticmethod
    def right_for_peers() -> Results:
        x_TD, w_GDF = mine(X_TD, {"ep": I}), mine(OWN_GDF, {"ep": V})
        router_DE = mine(ROUTER_DE, {"ep": I}, grad=True)
        used_TD = convert(x_TD, "ep", src=I, dst=R)
        scores_TE = convert(x_TD @ router_DE, "ep", src=I, dst=R)
        y_TF = summed(used_TD, scores_TE, w_GDF)
        y_TF.square().sum().backward()
        return {"y_TF": y_TF, "router.grad": router_DE.grad}

    @staticmethod
    def wrong_for_dtensor() -> Results:
        return masked_in_dtensor(None)

    @staticmethod
    def right_for_dtensor() -> Results:
        return masked_in_dtensor([Partial()])


TOKENS_TD, W_DE, PROBE_DE = numbers(6, 4), numbers(4, 3, seed=2), numbers(4, 3, seed=1)


class B50:
    @staticmethod
    def wrong_for_peers() -> Results:
        x_TD = mine(TOKENS_TD, {"ep": S(0)})
        gate_DE = mine(PROBE_DE, {"ep": R}, grad=True)
        w_DE = mine(W_DE, {"ep": S(1)}, grad=True)
        probs_TE = x_TD @ gate_DE
        pieces = [assert_type(torch.zeros(2, 3).double(), {"ep": R}) for _ in range(3)]
        dist.all_gather(pieces, probs_TE, group=device_mesh().get_group("ep"))
        full_TD = all_gather(x_TD, "ep", src=S(0), dst=R)
        mine_TE = convert(torch.cat(pieces), "ep", src=R, dst=S(1))
        y_TE = (full_TD @ w_DE) * mine_TE
        all_reduce(y_TE.sum(), "ep", src=P, dst=I).backward()
        return {"gate.grad": gate_DE.grad, "w.grad": w_DE.grad}

    @staticmethod
    def right_for_peers() -> Results:
        x_TD = mine(TOKENS_TD, {"ep": S(0)})
        gate_DE = mine(PROBE_DE, {"ep": R}, grad=True)
        w_DE = mine(W_DE, {"ep": S(1)}, grad=True)
        all_probs_TE = all_gather(x_TD @ gate_DE, "ep", src=S(0), dst=R)
        full_TD = all_gather(x_TD, "ep", src=S(0), dst=R)
        mine_TE = convert(all_probs_TE, "ep", src=R, dst=S(1))
        y_TE = (full_TD @ w_DE) * mine_TE
        all_reduce(y_TE.sum(), "ep", src=P, dst=I).backward()
        return {"gate.grad": gate_DE.grad, "w.grad": w_DE.grad}

    @staticmethod
    def wrong_for_dtensor() -> Results:
        x_TD, gate_DE = (
            placed(TOKENS_TD, {"ep": S(0)}),
            placed(PROBE_DE, {"ep": R}, grad=True),
        )
        w_DE = placed(W_DE, {"ep": S(1)}, grad=True)
        pieces = [torch.zeros(2, 3).double() for _ in range(3)]
        dist.all_gather(pieces, (x_TD @ gate_DE).to_local())
        probs_TE = from_local(torch.cat(pieces), Replicate())
        full_TD = x_TD.redistribute(placements=[Replicate()])
        y_TE = (full_TD @ w_DE) * probs_TE.redistribute(placements=[Shard(1)])
        y_TE.sum().full_tensor().backward()
        return {"gate.grad": gate_DE.grad, "w.grad": w_DE.grad}

    @staticmethod
    def right_for_dtensor() -> Results:
        x_TD, gate_DE = (
            placed(TOKENS_TD, {"ep": S(0)}),
            placed(PROBE_DE, {"ep": R}, grad=True),
        )
        w_DE = placed(W_DE, {"ep": S(1)}, grad=True)
        probs_TE = (x_TD @ gate_DE).redistribute(placements=[Replicate()])
        full_TD = x_TD.redistribute(placements=[Replicate()])
        y_TE = (full_TD @ w_DE) * probs_TE.redistribute(placements=[Shard(1)])
        y_TE.sum().full_tensor().backward()
        return {"gate.grad": gate_DE.grad, "w.grad": w_DE.grad}
