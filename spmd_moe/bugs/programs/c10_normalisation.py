"""C10: a loss divided by this rank's share, or summed over a vocabulary it has whole."""

# torch does not type `backward`, nor the functions of nn.functional:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from placements import I, On, P, R, S, all_gather, all_reduce, convert, global_mean, typed
from spmd_moe.bugs.record import TYPES, Refused, Results, bug, mine, numbers

X_TD, W_DV = numbers(5, 4), numbers(4, 6, seed=1)
LABELS_T = torch.tensor([5, 0, 3, 2, 2])
VOCAB = W_DV.shape[1]


@typed
def vocab_parallel_loss(
    logits_TV: Annotated[Float[Tensor, "T V"], On(tp=S(1))],
    labels_T: Annotated[Int[Tensor, " T"], On(tp=R)],
) -> Annotated[Float[Tensor, ""], On(tp=I)]:
    """The summed cross entropy of logits whose vocabulary is cut over tp."""
    total_T = all_reduce(logits_TV.exp().sum(1), "tp", src=P, dst=I)
    is_label_TV = convert(one_hot(labels_T, VOCAB), "tp", src=R, dst=S(1))
    target_T = all_reduce((logits_TV * is_label_TV).sum(1), "tp", src=P, dst=I)
    return (total_T.log() - target_T).sum()


@bug(
    "B64",
    "Megatron-LM #7452, finding 2",
    "C10",
    "logits that were gathered go to a loss that sums over tp",
    mesh={"tp": 2},
    refused=Refused(TYPES, "tp", "logits_TV", "annotation"),
    results={"loss": {"tp": I}, "w.grad": {"tp": S(1)}},
)
class GatheredLogits:
    @staticmethod
    def one_device() -> Results:
        w_DV = W_DV.clone().requires_grad_()
        loss = cross_entropy(X_TD @ w_DV, LABELS_T, reduction="sum")
        loss.backward()
        return {"loss": loss.detach(), "w.grad": w_DV.grad}

    @staticmethod
    def wrong() -> None:
        x_TD, labels_T = mine(X_TD, {"tp": R}), mine(LABELS_T, {"tp": R})
        w_DV = mine(W_DV, {"tp": S(1)}, grad=True)
        logits_TV = all_gather(x_TD @ w_DV, "tp", src=S(1), dst=R)
        vocab_parallel_loss(logits_TV, labels_T).backward()

    @staticmethod
    def right() -> Results:
        x_TD, labels_T = mine(X_TD, {"tp": R}), mine(LABELS_T, {"tp": R})
        w_DV = mine(W_DV, {"tp": S(1)}, grad=True)
        loss = vocab_parallel_loss(x_TD @ w_DV, labels_T)
        loss.backward()
        return {"loss": loss, "w.grad": w_DV.grad}


@bug(
    "B65",
    "Megatron-LM #737, #7464",
    "C10",
    "label smoothing averages over this rank's part of the vocabulary",
    mesh={"tp": 2},
    refused=Refused(TYPES, "tp", "logits_TV", "this rank's count"),
    results={"mean_T": {"tp": I}, "w.grad": {"tp": S(1)}},
)
class LocalVocabulary:
    @staticmethod
    def one_device() -> Results:
        w_DV = W_DV.clone().requires_grad_()
        logits_TV = X_TD @ w_DV
        mean_T = logits_TV.mean(1) - logits_TV.logsumexp(1)
        mean_T.sum().backward()
        return {"mean_T": mean_T.detach(), "w.grad": w_DV.grad}

    @staticmethod
    def wrong() -> None:
        w_DV = mine(W_DV, {"tp": S(1)}, grad=True)
        logits_TV = mine(X_TD, {"tp": R}) @ w_DV
        total_T = all_reduce(logits_TV.exp().sum(1), "tp", src=P, dst=I)
        mean_T = logits_TV.mean(1)
        mean_T = mean_T - total_T.log()  # the mean of the log-probabilities
        mean_T.sum().backward()

    @staticmethod
    def right() -> Results:
        w_DV = mine(W_DV, {"tp": S(1)}, grad=True)
        logits_TV = mine(X_TD, {"tp": R}) @ w_DV
        total_T = all_reduce(logits_TV.exp().sum(1), "tp", src=P, dst=I)
        mean_T = global_mean(logits_TV.sum(1), VOCAB, "tp") - total_T.log()
        mean_T.sum().backward()
        return {"mean_T": mean_T, "w.grad": w_DV.grad}


IGNORED = -100
ROWS_TD = numbers(6, 4, seed=3)
ROW_LABELS_T = torch.tensor([5, 0, 3, IGNORED, 2, IGNORED])  # 3 valid here, 1 there


@bug(
    "B67",
    "torchtitan #1842, #2206",
    "C10",
    "each data rank divides by its own number of valid tokens",
    mesh={"dp": 2},
    refused=Refused(TYPES, "dp", "logits_TV", "this rank's count"),
    results={"loss": {"dp": I}, "w.grad": {"dp": P}},
)
class MeanOfMeans:
    @staticmethod
    def one_device() -> Results:
        w_DV = W_DV.clone().requires_grad_()
        loss = cross_entropy(ROWS_TD @ w_DV, ROW_LABELS_T, ignore_index=IGNORED)
        loss.backward()
        return {"loss": loss.detach(), "w.grad": w_DV.grad}

    @staticmethod
    def wrong() -> None:
        w_DV = mine(W_DV, {"dp": R}, grad=True)
        labels_T = mine(ROW_LABELS_T, {"dp": S(0)})
        logits_TV = mine(ROWS_TD, {"dp": S(0)}) @ w_DV
        loss = cross_entropy(logits_TV, labels_T, ignore_index=IGNORED)
        (all_reduce(loss, "dp", src=P, dst=I) / 2).backward()

    @staticmethod
    def right() -> Results:
        w_DV = mine(W_DV, {"dp": R}, grad=True)
        labels_T = mine(ROW_LABELS_T, {"dp": S(0)})
        logits_TV = mine(ROWS_TD, {"dp": S(0)}) @ w_DV
        total = cross_entropy(logits_TV, labels_T, ignore_index=IGNORED, reduction="sum")
        loss = global_mean(total, (labels_T != IGNORED).sum(), "dp")
        loss.backward()
        return {"loss": loss, "w.grad": w_DV.grad}


BUGS = (GatheredLogits, LocalVocabulary, MeanOfMeans)
