"""C6: pieces of unequal length, padding, and sizes that are this rank's own."""

# torch does not type `backward`:
# pyright: reportUnknownMemberType=false

from typing import Annotated

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import one_hot

from placements import (
    I,
    On,
    P,
    Padded,
    R,
    Ragged,
    S,
    V,
    all_gather,
    all_reduce,
    assert_type,
    convert,
    pad_rows,
    reduce_scatter,
    split,
    typed,
)
from spmd_moe.bugs.record import KIT, TYPES, Refused, Results, bug, mine, numbers

X_TD, W_TD = numbers(5, 3), numbers(5, 3, seed=1)


@bug(
    "B44",
    "torchtitan #3577, #3664",
    "C6",
    "combine takes its own number of tokens for every rank's",
    mesh={"tp": 2},
    refused=Refused(TYPES, "tp", "full_TD", "rows of each rank's piece"),
    results={"full_TD": {"tp": I}, "x.grad": {"tp": S(0, Padded(5))}},
)
class EvenTokens:
    @staticmethod
    def one_device() -> Results:
        x_TD = X_TD.clone().requires_grad_()
        full_TD = x_TD**2
        (full_TD * W_TD).sum().backward()
        return {"full_TD": full_TD.detach(), "x.grad": x_TD.grad}

    @staticmethod
    def wrong() -> None:
        x_TD = mine(X_TD, {"tp": S(0, Padded(5))}, grad=True)
        y_TD = x_TD**2
        tokens, rank = y_TD.shape[0], dist.get_rank()
        full_TD = torch.zeros(2 * tokens, 3).double()
        full_TD[rank * tokens : (rank + 1) * tokens] = y_TD
        full_TD = all_reduce(full_TD, "tp", src=P, dst=I)
        (full_TD * mine(W_TD, {"tp": I})).sum().backward()

    @staticmethod
    def right() -> Results:
        x_TD = mine(X_TD, {"tp": S(0, Padded(5))}, grad=True)
        y_TD = x_TD**2
        full_TD = all_gather(y_TD, "tp", src=S(0, Padded(5)), dst=I)
        (full_TD * mine(W_TD, {"tp": I})).sum().backward()
        return {"full_TD": full_TD, "x.grad": x_TD.grad}


FEW_TD, GATE_DE = numbers(2, 3, seed=2), numbers(3, 4, seed=3)  # two tokens, four ranks


@bug(
    "B45",
    "torchtitan #3622, #4080",
    "C6",
    "tokens are padded to the degree of tp, and the padding is routed",
    mesh={"tp": 4},
    refused=Refused(TYPES, None, "chosen_TE", "padding"),
    results={"y_TE": {"tp": I}, "counts_E": {"tp": I}, "gate.grad": {"tp": P}},
)
class RoutedPadding:
    @staticmethod
    def one_device() -> Results:
        gate_DE = GATE_DE.clone().requires_grad_()
        scores_TE = FEW_TD @ gate_DE
        counts_E = one_hot(scores_TE.argmax(1), 4).sum(0)
        y_TE = scores_TE**2
        y_TE.sum().backward()
        return {"y_TE": y_TE.detach(), "counts_E": counts_E, "gate.grad": gate_DE.grad}

    @staticmethod
    def wrong() -> None:
        gate_DE = mine(GATE_DE, {"tp": R}, grad=True)
        x_TD, _ = pad_rows(mine(FEW_TD, {"tp": R}), 0, to=4)
        scores_TE = convert(x_TD, "tp", src=R, dst=S(0)) @ gate_DE
        chosen_TE = one_hot(scores_TE.argmax(1), 4)
        all_reduce(chosen_TE.sum(0), "tp", src=P, dst=I)
        y_TE = all_gather(scores_TE**2, "tp", src=S(0), dst=I)[:2]
        y_TE.sum().backward()

    @staticmethod
    def right() -> Results:
        gate_DE = mine(GATE_DE, {"tp": R}, grad=True)
        x_TD, valid_T = pad_rows(mine(FEW_TD, {"tp": R}), 0, to=4)
        valid_T1 = convert(valid_T, "tp", src=R, dst=S(0)).unsqueeze(1)
        scores_TE = convert(x_TD, "tp", src=R, dst=S(0)) @ gate_DE
        chosen_TE = torch.where(valid_T1, one_hot(scores_TE.argmax(1), 4), 0)
        counts_E = all_reduce(chosen_TE.sum(0), "tp", src=P, dst=I)
        y_TE = all_gather(scores_TE**2, "tp", src=S(0), dst=I)[:2]
        y_TE.sum().backward()
        return {"y_TE": y_TE, "counts_E": counts_E, "gate.grad": gate_DE.grad}


SIZES = (3, 4, 5, 2)
ROWS_TD, V_TD = numbers(14, 3), numbers(14, 3, seed=1)
W_DF, W_FD = numbers(3, 4, seed=2), numbers(4, 3, seed=3)  # hidden units cut over ep


def own_tokens() -> Tensor:
    """What a data loader gives this rank: a number of tokens of its own."""
    return split(ROWS_TD, {"ep": S(0, Ragged(*SIZES))}, {"ep": 4})[dist.get_rank()]


@bug(
    "B47",
    "NeMo Automodel #1365",
    "C6",
    "tokens of unequal number are gathered as if all ranks had as many",
    mesh={"ep": 4},
    refused=Refused(KIT, None, "rank 3  all_gather", "different shape"),
    results={
        "y_TD": {"ep": S(0, Ragged(*SIZES))},
        "x.grad": {"ep": S(0, Ragged(*SIZES))},
    },
)
class EvenGather:
    @staticmethod
    def one_device() -> Results:
        x_TD = ROWS_TD.clone().requires_grad_()
        y_TD = x_TD @ W_DF @ W_FD
        (y_TD * V_TD).sum().backward()
        return {"y_TD": y_TD.detach(), "x.grad": x_TD.grad}

    @staticmethod
    def wrong() -> None:
        x_TD = assert_type(own_tokens().requires_grad_(), {"ep": S(0)})
        full_TD = all_gather(x_TD, "ep", src=S(0), dst=R)
        y_TD = full_TD @ mine(W_DF, {"ep": S(1)}) @ mine(W_FD, {"ep": S(0)})
        y_TD = reduce_scatter(y_TD, "ep", src=P, dst=S(0))
        all_reduce(y_TD.sum(), "ep", src=P, dst=I).backward()

    @staticmethod
    def right() -> Results:
        x_TD = own_tokens().requires_grad_()
        number = assert_type(torch.tensor(x_TD.shape[0]), {"ep": V})
        sizes = all_gather(number, "ep", src=V, dst=R)
        rows = S(0, Ragged(*(int(size) for size in sizes)))
        assert_type(x_TD, {"ep": rows})
        full_TD = all_gather(x_TD, "ep", src=rows, dst=R)
        y_TD = full_TD @ mine(W_DF, {"ep": S(1)}) @ mine(W_FD, {"ep": S(0)})
        y_TD = reduce_scatter(y_TD, "ep", src=P, dst=rows)
        loss = (y_TD * mine(V_TD, {"ep": rows})).sum()
        all_reduce(loss, "ep", src=P, dst=I).backward()
        return {"y_TD": y_TD, "x.grad": x_TD.grad}


@typed
def load_loss(
    counts_E: Annotated[Float[Tensor, " E"], On(dp=P)],
    scores_E: Annotated[Float[Tensor, " E"], On(dp=R)],
) -> Annotated[Float[Tensor, ""], On(dp=P)]:
    """Counts that still have to be summed over dp, weighed by the scores."""
    return (counts_E * scores_E).sum()


COUNTS_E, SCORES_E = numbers(4).abs(), numbers(4, seed=2)


@bug(
    "B49",
    "torchtitan #3762",
    "C6",
    "counts that are complete, where Partial is asked, on one rank",
    mesh={"dp": 1, "tp": 2},
    refused=None,
    results={"loss": {"tp": I}, "scores.grad": {"tp": I}},
)
class OneRankAxis:
    @staticmethod
    def one_device() -> Results:
        scores_E = SCORES_E.clone().requires_grad_()
        loss = (COUNTS_E * scores_E).sum()
        loss.backward()
        return {"loss": loss.detach(), "scores.grad": scores_E.grad}

    @staticmethod
    def right() -> Results:
        scores_E = mine(SCORES_E, {"dp": R, "tp": I}, grad=True)
        counts_E = mine(COUNTS_E, {"dp": R, "tp": I})
        loss = load_loss(counts_E, scores_E)
        loss = all_reduce(loss, "dp", src=P, dst=I)
        loss.backward()
        return {"loss": loss, "scores.grad": scores_E.grad}


BUGS = (EvenTokens, RoutedPadding, EvenGather, OneRankAxis)
