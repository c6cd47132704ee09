"""C6 and C9 for the peers: how many rows, and of which rank."""

# torch does not type `backward`:
# pyright: reportUnknownMemberType=false

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn.functional import one_hot, pad

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
    reduce_scatter,
    reinterpret,
)
from spmd_moe.bugs.peers.words import from_local, loaded, locally, placed
from spmd_moe.bugs.record import Results, mine, numbers

FIVE_TD = numbers(5, 3).tensor_split(2)


def placed_rows(x_TD: Tensor, known_sizes: bool) -> Tensor:
    """This rank's rows, three or two of five, among zeros for the others'."""
    rows, rank = x_TD.shape[0], dist.get_rank()
    before = 3 * rank if known_sizes else rank * rows
    total = 5 if known_sizes else 2 * rows
    return pad(x_TD**2, (0, 0, before, total - before - rows))


def uneven_rows(known_sizes: bool) -> Results:
    own_TD = loaded(FIVE_TD).requires_grad_()
    x_TD = assert_type(own_TD, {"tp": V})

    def body() -> Tensor:
        return reinterpret(placed_rows(x_TD, known_sizes), "tp", src=V, dst=P)

    full_TD = all_reduce(locally(body, {"tp": P}), "tp", src=P, dst=I)
    full_TD.sum().backward()
    return {"full_TD": full_TD}


def uneven_in_dtensor(known_sizes: bool) -> Results:
    own_TD = loaded(FIVE_TD).requires_grad_()
    full_TD = from_local(placed_rows(own_TD, known_sizes), Partial())
    full_TD = full_TD.redistribute(placements=[Replicate()])
    full_TD.sum().backward()
    return {"full_TD": full_TD}


class B44:
    # Unequal pieces are a Varying, of which spmd_types says no sizes.
    @staticmethod
    def wrong_for_peers() -> Results:
        return uneven_rows(False)

    @staticmethod
    def right_for_peers() -> Results:
        return uneven_rows(True)

    @staticmethod
    def wrong_for_dtensor() -> Results:
        return uneven_in_dtensor(False)

    @staticmethod
    def right_for_dtensor() -> Results:
        return uneven_in_dtensor(True)


FEW_TD = torch.cat([numbers(2, 3, seed=2), torch.zeros(2, 3).double()])
SCORE_DE, VALID_T = numbers(3, 4, seed=3), torch.arange(4) < 2


def routed_rows(masked: bool) -> Results:
    gate_DE = mine(SCORE_DE, {"tp": R}, grad=True)
    valid_T1 = mine(VALID_T, {"tp": S(0)}).unsqueeze(1)
    scores_TE = mine(FEW_TD, {"tp": S(0)}) @ gate_DE
    chosen_TE = one_hot(scores_TE.argmax(1), 4)
    if masked:
        chosen_TE = chosen_TE * valid_T1
    counts_E = all_reduce(chosen_TE.sum(0), "tp", src=P, dst=I)
    y_TE = all_gather(scores_TE**2, "tp", src=S(0), dst=I)[:2]
    y_TE.sum().backward()
    return {"y_TE": y_TE, "counts_E": counts_E}


class B45:
    @staticmethod
    def wrong_for_peers() -> Results:
        return routed_rows(False)

    @staticmethod
    def right_for_peers() -> Results:
        return routed_rows(True)


SIZES = (3, 4, 5, 2)
ROWS_TD = numbers(14, 3).tensor_split((3, 7, 12))
W1_DF, W2_FD = numbers(3, 4, seed=2), numbers(4, 3, seed=3)


def gathered_rows(padded: bool) -> Results:
    own_TD = loaded(ROWS_TD).requires_grad_()
    x_TD = assert_type(own_TD, {"ep": V})
    w1_DF, w2_FD = mine(W1_DF, {"ep": S(1)}), mine(W2_FD, {"ep": S(0)})
    rows = x_TD.shape[0]
    missing = max(SIZES) - rows if padded else 0

    def body() -> Tensor:
        full_TD = all_gather(pad(x_TD, (0, 0, 0, missing)), "ep", src=S(0), dst=R)
        y_TD = reduce_scatter(full_TD @ w1_DF @ w2_FD, "ep", src=P, dst=S(0))
        return reinterpret((y_TD[:rows] ** 2).sum(), "ep", src=V, dst=P)

    all_reduce(locally(body, {"ep": P}), "ep", src=P, dst=I).backward()
    return {"x.grad": own_TD.grad}


def gathered_in_dtensor(padded: bool) -> Results:
    own_TD = loaded(ROWS_TD).requires_grad_()
    rows = own_TD.shape[0]
    held_TD = pad(own_TD, (0, 0, 0, max(SIZES) - rows)) if padded else own_TD
    full_TD = from_local(held_TD, Shard(0)).redistribute(placements=[Replicate()])
    y_TD = full_TD @ placed(W1_DF, {"ep": S(1)}) @ placed(W2_FD, {"ep": S(0)})
    y_TD = y_TD.redistribute(placements=[Shard(0)]).to_local()[:rows]
    (y_TD**2).sum().backward()
    return {"x.grad": own_TD.grad}


class B47:
    @staticmethod
    def wrong_for_peers() -> Results:
        return gathered_rows(False)

    @staticmethod
    def right_for_peers() -> Results:
        return gathered_rows(True)

    @staticmethod
    def wrong_for_dtensor() -> Results:
        return gathered_in_dtensor(False)

    @staticmethod
    def right_for_dtensor() -> Results:
        return gathered_in_dtensor(True)


COUNTS_E, SCORES_E = numbers(4).abs(), numbers(4, seed=2)


class B49:
    @staticmethod
    def right_for_peers() -> Results:
        scores_E = mine(SCORES_E, {"dp": R, "tp": I}, grad=True)
        counts_E = mine(COUNTS_E, {"dp": R, "tp": I})
        counts_E = assert_type(counts_E, {"dp": P, "tp": I})
        loss = all_reduce((counts_E * scores_E).sum(), "dp", src=P, dst=I)
        loss.backward()
        return {"loss": loss, "scores.grad": scores_E.grad}


SIX_TD, V_TD = numbers(6, 3), numbers(6, 3, seed=1)
NUMBERS, TWO = torch.arange(3), torch.arange(2)


def split_by(rank: Tensor) -> Results:
    x_TD = mine(SIX_TD, {"ep": I, "tp": R}, grad=True)

    def body() -> Tensor:
        return x_TD.view(3, 2, 3).index_select(0, rank.view(1)).squeeze(0) ** 2

    y_TD = locally(body, {"ep": I, "tp": S(0)})
    full_TD = all_gather(y_TD, "tp", src=S(0), dst=I)
    (full_TD * mine(V_TD, {"ep": I, "tp": I})).sum().backward()
    return {"y_TD": full_TD, "x.grad": x_TD.grad}


def split_in_dtensor(axis: str) -> Results:
    x_TD = placed(SIX_TD, {"ep": R, "tp": R}, grad=True)
    held_TD = x_TD.to_local(grad_placements=[Replicate(), Partial()])
    y_TD = from_local(held_TD.chunk(3)[axis_rank(axis)] ** 2, Replicate(), Shard(0))
    full_TD = y_TD.redistribute(placements=[Replicate(), Replicate()])
    (full_TD * placed(V_TD, {"ep": R, "tp": R})).sum().backward()
    return {"y_TD": full_TD, "x.grad": x_TD.grad}


class B58:
    # The rank as a tensor with a type; a chunk by a plain number is not Varying there,
    # and its gather is refused, be it the right number or not.
    @staticmethod
    def wrong_for_peers() -> Results:
        return split_by(mine(TWO, {"ep": V, "tp": R}))

    @staticmethod
    def right_for_peers() -> Results:
        return split_by(mine(NUMBERS, {"ep": I, "tp": V}))

    @staticmethod
    def wrong_for_dtensor() -> Results:
        return split_in_dtensor("ep")

    @staticmethod
    def right_for_dtensor() -> Results:
        return split_in_dtensor("tp")


def scatter_in_dtensor(axis: str) -> Results:
    x_TD = placed(SIX_TD, {"pp": R, "tp": R}, grad=True)
    held_TD = x_TD.to_local(grad_placements=[Replicate(), Partial()])
    y_TD = from_local(held_TD.chunk(2)[axis_rank(axis)] ** 2, Replicate(), Shard(0))
    full_TD = y_TD.redistribute(placements=[Replicate(), Replicate()])
    (full_TD * placed(V_TD, {"pp": R, "tp": R})).sum().backward()
    return {"y_TD": full_TD, "x.grad": x_TD.grad}


class B60:
    # A redistribution reads its source; only a scatter by hand can take another group.
    @staticmethod
    def wrong_for_dtensor() -> Results:
        return scatter_in_dtensor("pp")

    @staticmethod
    def right_for_dtensor() -> Results:
        return scatter_in_dtensor("tp")
