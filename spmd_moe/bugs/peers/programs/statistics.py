"""C4 for the peers: auxiliary losses, counts and the expert bias."""

# torch does not type `backward` and the collectives:
# pyright: reportUnknownMemberType=false

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.nn.functional import cross_entropy

from placements import I, P, R, S, all_reduce, assert_type
from placements.testing import device_mesh
from spmd_moe.bugs.peers.words import from_local, placed
from spmd_moe.bugs.programs.c04_statistics import LABELS_T as LABELS_OF_TEN
from spmd_moe.bugs.programs.c04_statistics import X_TD as TEN_TD
from spmd_moe.bugs.record import Results, mine, numbers

# Eight tokens, two on each rank: pieces of equal length, which the peers can say.
X_TD, LABELS_T, GATE_DE = TEN_TD[:8], LABELS_OF_TEN[:8], numbers(3, 4, seed=1)
TOP_K, NUM_EXPERTS, NUM_TOKENS = 2, 4, 8


def choices(probs_TE: Tensor) -> Tensor:
    """One for each expert that a row chose."""
    ids_TK = probs_TE.detach().topk(TOP_K, 1).indices
    return torch.zeros_like(probs_TE).scatter(1, ids_TK, 1.0)


def over_dp(x: Tensor) -> Tensor:
    return all_reduce(x, "dp", src=P, dst=R)


def over_tp(x: Tensor) -> Tensor:
    return all_reduce(x, "tp", src=P, dst=R)


def balance_loss(probs_TE: Tensor, counts_E: Tensor, num_tokens: int) -> Tensor:
    """These tokens' share of the loss over all tokens, given the counts of all."""
    return NUM_EXPERTS * (probs_TE.sum(0) * counts_E).sum() / num_tokens**2


def backward(loss: Tensor) -> None:
    """The loss of all ranks is the sum of theirs."""
    loss = all_reduce(loss, "dp", src=P, dst=I)
    all_reduce(loss, "tp", src=P, dst=I).backward()


def gradient_of(gate_DE: Tensor) -> Tensor:
    """As a wrapper sees it: a summand on both axes."""
    assert gate_DE.grad is not None
    return assert_type(gate_DE.grad, {"dp": P, "tp": P})


def gate_and_tokens() -> tuple[Tensor, Tensor]:
    gate_DE = mine(GATE_DE, {"dp": R, "tp": R}, grad=True)
    return gate_DE, mine(X_TD, {"dp": S(0), "tp": S(0)})


def shares_in_dtensor(grad_over_dp: Placement) -> Results:
    """An averaging wrapper is a gradient that is Partial("avg") over dp."""
    gate_DE = placed(GATE_DE, {"dp": R, "tp": R}, grad=True)
    x_TD = placed(X_TD, {"dp": S(0), "tp": S(0)})
    used_DE = gate_DE.to_local(grad_placements=[grad_over_dp, Partial()])
    probs_TE = from_local((x_TD.to_local() @ used_DE).softmax(1), Shard(0), Shard(0))
    counts_E = over_tp(over_dp(choices(probs_TE).sum(0)))
    backward(balance_loss(probs_TE, counts_E, NUM_TOKENS))
    return {"gate.grad": gate_DE.grad}


class B26:
    @staticmethod
    def wrong_for_peers() -> Results:
        gate_DE, x_TD = gate_and_tokens()
        probs_TE = (x_TD @ gate_DE).softmax(1)
        counts_E = over_tp(over_dp(choices(probs_TE).sum(0)))
        backward(balance_loss(probs_TE, counts_E, NUM_TOKENS))
        grad_DE = over_tp(gradient_of(gate_DE))
        dist.all_reduce(grad_DE, op=dist.ReduceOp.AVG, group=device_mesh().get_group("dp"))
        return {"gate.grad": grad_DE}

    @staticmethod
    def right_for_peers() -> Results:
        gate_DE, x_TD = gate_and_tokens()
        probs_TE = (x_TD @ gate_DE).softmax(1)
        counts_E = over_tp(over_dp(choices(probs_TE).sum(0)))
        backward(balance_loss(probs_TE, counts_E, NUM_TOKENS))
        return {"gate.grad": over_dp(over_tp(gradient_of(gate_DE)))}

    @staticmethod
    def wrong_for_dtensor() -> Results:
        return shares_in_dtensor(Partial("avg"))

    @staticmethod
    def right_for_dtensor() -> Results:
        return shares_in_dtensor(Partial())


def with_aux_loss(sum_count_first: bool) -> Results:
    gate_DE, x_TD = gate_and_tokens()
    labels_T = mine(LABELS_T, {"dp": S(0), "tp": S(0)})
    logits_TE = x_TD @ gate_DE
    probs_TE = logits_TE.softmax(1)
    aux = balance_loss(probs_TE, over_tp(over_dp(choices(probs_TE).sum(0))), NUM_TOKENS)
    num_tokens = (labels_T >= 0).sum()
    total_tokens = over_tp(over_dp(num_tokens))
    # multiplied here, since everything is divided by the count at the end
    aux = aux * (total_tokens if sum_count_first else num_tokens)
    loss = cross_entropy(logits_TE, labels_T, reduction="sum") + aux
    backward(loss / total_tokens)
    return {"gate.grad": gate_DE.grad}


class B27:
    @staticmethod
    def wrong_for_peers() -> Results:
        return with_aux_loss(False)

    @staticmethod
    def right_for_peers() -> Results:
        return with_aux_loss(True)


# Counts of each expert that are still to be summed over tp, and scores.
COUNTS_E, SCORES_E = numbers(4, seed=5).abs(), numbers(4, seed=6)


def with_count_of_tokens(in_place: bool) -> Results:
    local_E = mine(COUNTS_E, {"dp": R, "tp": P})
    if in_place:
        counts_E = local_E
        dist.all_reduce(counts_E, group=device_mesh().get_group("tp"))
    else:
        counts_E = over_tp(local_E)
    # meant to be this rank's tokens, and to be summed over tp with the rest
    num_tokens = over_tp(local_E.sum() / TOP_K)
    aux = (counts_E * mine(SCORES_E, {"dp": R, "tp": R})).sum() * num_tokens
    return {"aux": aux}


def with_count_in_dtensor(in_place: bool) -> Results:
    local_E = placed(COUNTS_E, {"dp": R, "tp": P})
    if in_place:  # what a raw collective gets is the tensor inside
        dist.all_reduce(local_E.to_local(), group=device_mesh().get_group("tp"))
        counts_E = from_local(local_E.to_local(), Replicate(), Replicate())
    else:
        counts_E = over_tp(local_E)
    num_tokens = over_tp(local_E.sum() / TOP_K)
    aux = (counts_E * placed(SCORES_E, {"dp": R, "tp": R})).sum() * num_tokens
    return {"aux": aux}


class B28:
    @staticmethod
    def wrong_for_peers() -> Results:
        return with_count_of_tokens(True)

    @staticmethod
    def right_for_peers() -> Results:
        return with_count_of_tokens(False)

    @staticmethod
    def wrong_for_dtensor() -> Results:
        return with_count_in_dtensor(True)

    @staticmethod
    def right_for_dtensor() -> Results:
        return with_count_in_dtensor(False)


class B31:
    @staticmethod
    def wrong_for_peers() -> Results:
        gate_DE, x_TD = gate_and_tokens()
        bias_E = mine(torch.zeros(NUM_EXPERTS).double(), {"dp": R, "tp": R})
        counts_E = over_dp(choices(x_TD @ gate_DE).sum(0))
        bias_E.add_((counts_E.mean() - counts_E).sign())
        return {"bias_E": bias_E}

    @staticmethod
    def right_for_peers() -> Results:
        gate_DE, x_TD = gate_and_tokens()
        bias_E = mine(torch.zeros(NUM_EXPERTS).double(), {"dp": R, "tp": R})
        counts_E = over_tp(over_dp(choices(x_TD @ gate_DE).sum(0)))
        bias_E.add_((counts_E.mean() - counts_E).sign())
        return {"bias_E": bias_E}


# Eight tokens and four rows of padding, three rows on each rank.
PADDED_TD = torch.cat([X_TD, torch.zeros(4, 3).double()])
VALID_T = torch.arange(12) < NUM_TOKENS


def over_rows(masked: bool) -> Results:
    gate_DE = mine(GATE_DE, {"dp": R, "tp": R}, grad=True)
    x_TD = mine(PADDED_TD, {"dp": S(0), "tp": S(0)})
    valid_T1 = mine(VALID_T, {"dp": S(0), "tp": S(0)}).unsqueeze(1)
    probs_TE = (x_TD @ gate_DE).softmax(1)
    chosen_TE = choices(probs_TE)
    if masked:
        probs_TE, chosen_TE = probs_TE * valid_T1, chosen_TE * valid_T1
    counts_E = over_tp(over_dp(chosen_TE.sum(0)))
    backward(balance_loss(probs_TE, counts_E, NUM_TOKENS if masked else 12))
    return {"gate.grad": gate_DE.grad, "counts_E": counts_E}


class B33:
    @staticmethod
    def wrong_for_peers() -> Results:
        return over_rows(False)

    @staticmethod
    def right_for_peers() -> Results:
        return over_rows(True)
