"""C2 for the peers: a gradient is scaled by a group size."""

# torch does not type `backward` and the collectives:
# pyright: reportUnknownMemberType=false

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.nn.functional import cross_entropy

from placements import (
    I,
    P,
    R,
    S,
    all_gather,
    all_reduce,
    assert_type,
    convert,
    reduce_scatter,
)
from placements.testing import device_mesh
from spmd_moe.bugs.peers.words import from_local, placed
from spmd_moe.bugs.programs.c02_scaled_by_a_group import (
    GATES_TE,
    HELD,
    IMAGES_ND,
    NUM_TOKENS,
    TEXTS_ND,
    TOKENS,
    W_EDF,
    X_TD,
)
from spmd_moe.bugs.record import Results, mine

RANKS = 4


def token_losses(w_GDF: Tensor) -> Tensor:
    """One number for each token of this rank."""
    all_TD = all_gather(mine(X_TD, TOKENS), "ep", src=S(0), dst=R)
    all_TE = all_gather(mine(GATES_TE, TOKENS), "ep", src=S(0), dst=R)
    gates_TG = convert(all_TE, "ep", src=R, dst=S(1))
    y_TF = torch.einsum("tg,td,gdf->tf", gates_TG, all_TD, w_GDF)
    return reduce_scatter(y_TF, "ep", src=P, dst=S(0)).square().sum(1)


def backward(loss: Tensor) -> None:
    """The loss of all ranks is the sum of theirs."""
    loss = all_reduce(loss, "edp", src=P, dst=I)
    all_reduce(loss, "ep", src=P, dst=I).backward()


def gradient_of(w_GDF: Tensor) -> Tensor:
    """As a wrapper sees it: a summand over edp, this rank's experts over ep."""
    assert w_GDF.grad is not None
    return assert_type(w_GDF.grad, {"edp": P, "ep": S(0)})


def averaged_over_edp(grad_GDF: Tensor) -> Tensor:
    dist.all_reduce(grad_GDF, op=dist.ReduceOp.AVG, group=device_mesh().get_group("edp"))
    return grad_GDF


def in_dtensor(mean: bool, over_edp: Placement) -> Results:
    """An averaging wrapper is a gradient that is Partial("avg") over edp."""
    cut, gathered = [Shard(0), Shard(0)], [Shard(0), Replicate()]
    w_GDF = placed(W_EDF, HELD, grad=True)
    x_TD = placed(X_TD, TOKENS).redistribute(placements=gathered).to_local()
    gates_TE = placed(GATES_TE, TOKENS).redistribute(placements=gathered)
    gates_TG = gates_TE.redistribute(placements=[Shard(0), Shard(1)]).to_local()
    used_GDF = w_GDF.to_local(grad_placements=[over_edp, Shard(0)])
    y_TF = torch.einsum("tg,td,gdf->tf", gates_TG, x_TD, used_GDF)
    y_TF = from_local(y_TF, Shard(0), Partial()).redistribute(placements=cut).to_local()
    losses_T = y_TF.square().sum(1)
    (losses_T.mean() if mean else losses_T.sum() / NUM_TOKENS).backward()
    return {"w.grad": w_GDF.grad}


class B10:
    @staticmethod
    def wrong_for_peers() -> Results:
        w_GDF = mine(W_EDF, HELD, grad=True)
        backward(token_losses(w_GDF).mean())
        return {"w.grad": averaged_over_edp(gradient_of(w_GDF))}

    @staticmethod
    def right_for_peers() -> Results:
        w_GDF = mine(W_EDF, HELD, grad=True)
        backward(token_losses(w_GDF).sum() / NUM_TOKENS)
        return {"w.grad": all_reduce(gradient_of(w_GDF), "edp", src=P, dst=R)}

    @staticmethod
    def wrong_for_dtensor() -> Results:
        return in_dtensor(True, Partial("avg"))

    @staticmethod
    def right_for_dtensor() -> Results:
        return in_dtensor(False, Partial())


class B11:
    @staticmethod
    def wrong_for_peers() -> Results:
        w_GDF = mine(W_EDF, HELD, grad=True)
        backward(token_losses(w_GDF).sum() / (NUM_TOKENS // RANKS))
        grad_GDF = gradient_of(w_GDF)
        if device_mesh().size(0) > 1:
            grad_GDF = all_reduce(grad_GDF, "edp", src=P, dst=R) / RANKS
        return {"w.grad": grad_GDF}

    @staticmethod
    def right_for_peers() -> Results:
        w_GDF = mine(W_EDF, HELD, grad=True)
        backward(token_losses(w_GDF).sum() / (NUM_TOKENS // RANKS))
        grad_GDF = gradient_of(w_GDF)
        if device_mesh().size(0) > 1:
            grad_GDF = all_reduce(grad_GDF, "edp", src=P, dst=R)
        return {"w.grad": grad_GDF / RANKS}

    @staticmethod
    def wrong_for_dtensor() -> Results:
        grad: Any = in_dtensor(True, Partial())["w.grad"]
        return {"w.grad": grad / RANKS if device_mesh().size(0) > 1 else grad}

    @staticmethod
    def right_for_dtensor() -> Results:
        grad: Any = in_dtensor(True, Partial())["w.grad"]
        return {"w.grad": grad / RANKS}


class B12:
    @staticmethod
    def wrong_for_peers() -> Results:
        w_GDF = mine(W_EDF, HELD, grad=True)
        backward(token_losses(w_GDF).sum() / NUM_TOKENS)
        return {"w.grad": averaged_over_edp(gradient_of(w_GDF))}

    @staticmethod
    def right_for_peers() -> Results:
        w_GDF = mine(W_EDF, HELD, grad=True)
        backward(token_losses(w_GDF).sum() / NUM_TOKENS)
        return {"w.grad": all_reduce(gradient_of(w_GDF), "edp", src=P, dst=R)}

    @staticmethod
    def wrong_for_dtensor() -> Results:
        return in_dtensor(False, Partial("avg"))

    @staticmethod
    def right_for_dtensor() -> Results:
        return in_dtensor(False, Partial())


def contrastive_in_dtensor(grad_of_gathered: Any) -> Results:
    """Every rank computes the same loss on what it gathered."""
    images_ND = placed(IMAGES_ND, {"dp": S(0)}, grad=True)
    texts_ND = placed(TEXTS_ND, {"dp": S(0)}, grad=True)
    images = images_ND.full_tensor(grad_placements=grad_of_gathered)
    texts = texts_ND.full_tensor(grad_placements=grad_of_gathered)
    cross_entropy(images @ texts.T, torch.arange(6)).backward()
    return {"images.grad": images_ND.grad, "texts.grad": texts_ND.grad}


class B15:
    @staticmethod
    def wrong_for_dtensor() -> Results:
        return contrastive_in_dtensor([Partial()])

    @staticmethod
    def right_for_dtensor() -> Results:
        return contrastive_in_dtensor(None)
