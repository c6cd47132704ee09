"""C10 and C12 for the peers: losses over a cut vocabulary or batch, and precision."""

# torch does not type `backward`, nor the functions of nn.functional:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate
from torch.nn.functional import cross_entropy, one_hot

from placements import I, P, R, S, all_gather, all_reduce, convert
from spmd_moe.bugs.peers.words import from_local, placed
from spmd_moe.bugs.programs.c10_normalisation import (
    IGNORED,
    LABELS_T,
    ROW_LABELS_T,
    ROWS_TD,
    VOCAB,
    W_DV,
    X_TD,
)
from spmd_moe.bugs.record import Results, mine, numbers

TP = 2


def vocab_parallel_loss(logits_TV: Tensor, labels_T: Tensor, classes: int) -> Tensor:
    """The cross entropy of logits of which each rank of tp has this many classes."""
    total_T = all_reduce(logits_TV.exp().sum(1), "tp", src=P, dst=I)
    is_label_TV = convert(one_hot(labels_T, classes * TP), "tp", src=R, dst=S(1))
    target_T = all_reduce((logits_TV * is_label_TV).sum(1), "tp", src=P, dst=I)
    return (total_T.log() - target_T).sum()


def loss_in_dtensor(gathered: bool) -> Results:
    """The loss is a region that takes plain tensors, as a fused kernel does."""
    w_DV = placed(W_DV, {"tp": S(1)}, grad=True)
    logits_TV = (
        (placed(X_TD, {"tp": R}) @ w_DV).full_tensor()
        if gathered
        else ((placed(X_TD, {"tp": R}) @ w_DV).to_local())
    )
    classes = logits_TV.shape[1] * TP
    is_label_TV = placed(one_hot(LABELS_T, classes), {"tp": S(1)}).to_local()
    total_T = from_local(logits_TV.exp().sum(1), Partial()).full_tensor()
    target_T = from_local((logits_TV * is_label_TV).sum(1), Partial()).full_tensor()
    loss = (total_T.log() - target_T).sum()
    loss.backward()
    return {"loss": loss, "w.grad": w_DV.grad}


class B64:
    @staticmethod
    def wrong_for_peers() -> Results:
        x_TD, labels_T = mine(X_TD, {"tp": R}), mine(LABELS_T, {"tp": R})
        w_DV = mine(W_DV, {"tp": S(1)}, grad=True)
        logits_TV = all_gather(x_TD @ w_DV, "tp", src=S(1), dst=R)
        loss = vocab_parallel_loss(logits_TV, labels_T, VOCAB)
        loss.backward()
        return {"loss": loss, "w.grad": w_DV.grad}

    @staticmethod
    def right_for_peers() -> Results:
        x_TD, labels_T = mine(X_TD, {"tp": R}), mine(LABELS_T, {"tp": R})
        w_DV = mine(W_DV, {"tp": S(1)}, grad=True)
        loss = vocab_parallel_loss(x_TD @ w_DV, labels_T, VOCAB // TP)
        loss.backward()
        return {"loss": loss, "w.grad": w_DV.grad}

    @staticmethod
    def wrong_for_dtensor() -> Results:
        return loss_in_dtensor(True)

    @staticmethod
    def right_for_dtensor() -> Results:
        return loss_in_dtensor(False)


class B65:
    @staticmethod
    def wrong_for_peers() -> Results:
        w_DV = mine(W_DV, {"tp": S(1)}, grad=True)
        logits_TV = mine(X_TD, {"tp": R}) @ w_DV
        total_T = all_reduce(logits_TV.exp().sum(1), "tp", src=P, dst=I)
        mean_T = logits_TV.mean(1) - total_T.log()
        mean_T.sum().backward()
        return {"mean_T": mean_T, "w.grad": w_DV.grad}

    @staticmethod
    def right_for_peers() -> Results:
        w_DV = mine(W_DV, {"tp": S(1)}, grad=True)
        logits_TV = mine(X_TD, {"tp": R}) @ w_DV
        total_T = all_reduce(logits_TV.exp().sum(1), "tp", src=P, dst=I)
        mean_T = all_reduce(logits_TV.sum(1), "tp", src=P, dst=I) / VOCAB
        mean_T = mean_T - total_T.log()
        mean_T.sum().backward()
        return {"mean_T": mean_T, "w.grad": w_DV.grad}


def rows_in_dtensor() -> tuple[Any, Any]:
    logits_TV = placed(ROWS_TD, {"dp": S(0)}) @ placed(W_DV, {"dp": R}, grad=True)
    return logits_TV, placed(ROW_LABELS_T, {"dp": S(0)})


class B67:
    @staticmethod
    def wrong_for_peers() -> Results:
        w_DV = mine(W_DV, {"dp": R}, grad=True)
        labels_T = mine(ROW_LABELS_T, {"dp": S(0)})
        logits_TV = mine(ROWS_TD, {"dp": S(0)}) @ w_DV
        loss = cross_entropy(logits_TV, labels_T, ignore_index=IGNORED)
        loss = all_reduce(loss, "dp", src=P, dst=I) / 2
        loss.backward()
        return {"loss": loss}

    @staticmethod
    def right_for_peers() -> Results:
        w_DV = mine(W_DV, {"dp": R}, grad=True)
        labels_T = mine(ROW_LABELS_T, {"dp": S(0)})
        logits_TV = mine(ROWS_TD, {"dp": S(0)}) @ w_DV
        total = cross_entropy(logits_TV, labels_T, ignore_index=IGNORED, reduction="sum")
        count = all_reduce((labels_T != IGNORED).sum(), "dp", src=P, dst=I)
        loss = all_reduce(total, "dp", src=P, dst=I) / count
        loss.backward()
        return {"loss": loss}

    @staticmethod
    def wrong_for_dtensor() -> Results:
        logits_TV, labels_T = rows_in_dtensor()
        loss: Any = cross_entropy(logits_TV, labels_T, ignore_index=IGNORED)
        loss.full_tensor().backward()
        return {"loss": loss}

    @staticmethod
    def right_for_dtensor() -> Results:
        logits_TV, labels_T = rows_in_dtensor()
        total: Any = cross_entropy(
            logits_TV, labels_T, ignore_index=IGNORED, reduction="sum"
        )
        count = (labels_T != IGNORED).sum().redistribute(placements=[Replicate()])
        loss = total.redistribute(placements=[Replicate()]) / count
        loss.backward()
        return {"loss": loss}


NARROW_TD = (5 * numbers(6, 4)).to(torch.bfloat16)
GATE_DE = (numbers(4, 3, seed=1) + 2.0**-5).to(torch.bfloat16)


def top_scores(wide: bool) -> Results:
    x_TD, gate_DE = mine(NARROW_TD, {"tp": S(0)}), mine(GATE_DE, {"tp": R}, grad=True)
    logits_TE = x_TD.float() @ gate_DE.float() if wide else x_TD @ gate_DE
    top_T1 = logits_TE.topk(1, dim=1).values
    all_reduce(top_T1.sum(), "tp", src=P, dst=I).backward()
    return {"top_T1": top_T1}


class B70:
    @staticmethod
    def wrong_for_peers() -> Results:
        return top_scores(False)

    @staticmethod
    def right_for_peers() -> Results:
        return top_scores(True)
