"""C2: a gradient is scaled by a group size, since somebody averages or sums once too often.

Here reductions are sums and the loss is divided by the count of all tokens, so an expert's
gradient is the same for every split of the ranks into (edp, ep).
"""

# torch does not type `backward` and the collectives:
# pyright: reportUnknownMemberType=false

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from placements import (
    I,
    P,
    R,
    S,
    all_gather,
    all_reduce,
    convert,
    declare,
    global_mean,
    reduce_gradients,
    reduce_scatter,
)
from placements.testing import device_mesh
from spmd_moe.bugs.record import KIT, TYPES, Refused, Results, bug, mine, numbers

# Eight tokens, cut over all data ranks (edp, ep); the gates are zero where not routed.
X_TD, GATES_TE = numbers(8, 3), numbers(8, 4, seed=1)
W_EDF = numbers(4, 3, 2, seed=2)
TOKENS = {"edp": S(0), "ep": S(0)}
HELD = {"edp": R, "ep": S(0)}
WHOLE = {"edp": I, "ep": I}
NUM_TOKENS = 8


class Experts(nn.Module):
    """Experts over ep: each rank's experts see the tokens of all ep ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.w_GDF = nn.Parameter(mine(W_EDF, HELD))
        declare(self, {"w_GDF": HELD})

    def forward(self, x_TD: Tensor, gates_TE: Tensor) -> Tensor:
        all_TD = all_gather(x_TD, "ep", src=S(0), dst=R)
        all_TE = all_gather(gates_TE, "ep", src=S(0), dst=R)
        gates_TG = convert(all_TE, "ep", src=R, dst=S(1))
        y_TF = torch.einsum("tg,td,gdf->tf", gates_TG, all_TD, self.w_GDF)
        return reduce_scatter(y_TF, "ep", src=P, dst=S(0))


def token_losses(experts: Experts) -> Tensor:
    """One number for each token of this rank."""
    y_TF = experts(mine(X_TD, TOKENS), mine(GATES_TE, TOKENS))
    return y_TF.square().sum(1)


def expert_gradient_on_one_device() -> Results:
    w_EDF = W_EDF.clone().requires_grad_()
    y_TF = torch.einsum("te,td,edf->tf", GATES_TE, X_TD, w_EDF)
    loss = y_TF.square().sum(1).mean()
    loss.backward()
    return {"loss": loss, "w.grad": w_EDF.grad}


def summed_expert_gradient() -> Results:
    """One loss over the count of all tokens, and sums: nothing depends on (edp, ep)."""
    experts = Experts()
    total = token_losses(experts).sum()
    loss = global_mean(total, NUM_TOKENS, ("edp", "ep"))
    loss.backward()
    reduce_gradients(experts)
    return {"loss": loss, "w.grad": experts.w_GDF.grad}


@bug(
    "B10",
    "pytorch #160285, torchtitan #1551",
    "C2",
    "experts averaged over edp = dp / ep: gradients ep times too large",
    mesh={"edp": 2, "ep": 2},
    refused=Refused(TYPES, "edp", "losses_T", "divides by this rank's count"),
    results={"loss": WHOLE, "w.grad": HELD},
)
class MeanOfMeans:
    # An averaging wrapper needs a loss that is a mean on each rank: refused at once.
    one_device = staticmethod(expert_gradient_on_one_device)
    right = staticmethod(summed_expert_gradient)

    @staticmethod
    def wrong() -> Results:
        experts = Experts()
        losses_T = token_losses(experts)
        losses_T.mean().backward()
        grad_GDF = experts.w_GDF.grad
        assert grad_GDF is not None
        dist.all_reduce(
            grad_GDF, op=dist.ReduceOp.AVG, group=device_mesh().get_group("edp")
        )
        return {"w.grad": grad_GDF}


@bug(
    "B11",
    "pytorch #167178",
    "C2",
    "the divide factor is skipped where the shard mesh has one rank",
    mesh={"edp": 1, "ep": 4},
    refused=Refused(KIT, None, "w.grad", "not that of one device"),
    results={"loss": WHOLE, "w.grad": HELD},
)
class SkippedFactor:
    # A number of tokens that is written down has no type, and neither has a factor: the
    # comparison with one device tells.
    one_device = staticmethod(expert_gradient_on_one_device)
    right = staticmethod(summed_expert_gradient)

    @staticmethod
    def wrong() -> Results:
        experts = Experts()
        tokens_per_rank, factor = 2, 4
        loss = token_losses(experts).sum() / tokens_per_rank
        loss.backward()
        grad_GDF = experts.w_GDF.grad
        assert grad_GDF is not None
        if dist.get_world_size(device_mesh().get_group("edp")) > 1:
            grad_GDF = all_reduce(grad_GDF, "edp", src=P, dst=R) / factor
        mean = all_reduce(loss / factor, "ep", src=P, dst=I)
        return {"loss": mean, "w.grad": grad_GDF}


@bug(
    "B12",
    "DeepSpeed #5259, #5618, #6545, #6546",
    "C2",
    "the optimizer averages expert gradients over the expert-data group",
    mesh={"edp": 2, "ep": 2},
    refused=Refused(TYPES, "edp", "grad_GDF", "reductions are sums"),
    results={"loss": WHOLE, "w.grad": HELD},
)
class AveragedInOptimizer:
    # No typed collective averages; torch's own is refused.
    one_device = staticmethod(expert_gradient_on_one_device)
    right = staticmethod(summed_expert_gradient)

    @staticmethod
    def wrong() -> Results:
        experts = Experts()
        loss = global_mean(token_losses(experts).sum(), NUM_TOKENS, ("edp", "ep"))
        loss.backward()
        grad_GDF = experts.w_GDF.grad
        assert grad_GDF is not None
        expert_data = device_mesh().get_group("edp")
        dist.all_reduce(grad_GDF, op=dist.ReduceOp.AVG, group=expert_data)
        return {"loss": loss, "w.grad": grad_GDF}


# Pairs of an image and a text, three on each rank.
IMAGES_ND, TEXTS_ND = numbers(6, 2, seed=3), numbers(6, 2, seed=4)


def contrastive(images_ND: Tensor, texts_ND: Tensor) -> Tensor:
    logits_NN = images_ND @ texts_ND.T
    return cross_entropy(logits_NN, torch.arange(6))


@bug(
    "B15",
    "open_clip #616, pytorch #58005",
    "C2",
    "every rank computes the same loss on gathered features",
    mesh={"dp": 2},
    refused=Refused(TYPES, "dp", "loss", "n times too much"),
    results={"loss": {"dp": I}, "images.grad": {"dp": S(0)}, "texts.grad": {"dp": S(0)}},
)
class GatheredFeatures:
    @staticmethod
    def one_device() -> Results:
        images_ND = IMAGES_ND.clone().requires_grad_()
        texts_ND = TEXTS_ND.clone().requires_grad_()
        loss = contrastive(images_ND, texts_ND)
        loss.backward()
        return {"loss": loss, "images.grad": images_ND.grad, "texts.grad": texts_ND.grad}

    @staticmethod
    def wrong() -> None:
        images_ND = mine(IMAGES_ND, {"dp": S(0)}, grad=True)
        texts_ND = mine(TEXTS_ND, {"dp": S(0)}, grad=True)
        loss = contrastive(
            all_gather(images_ND, "dp", src=S(0), dst=R),
            all_gather(texts_ND, "dp", src=S(0), dst=R),
        )
        loss.backward()

    @staticmethod
    def right() -> Results:
        images_ND = mine(IMAGES_ND, {"dp": S(0)}, grad=True)
        texts_ND = mine(TEXTS_ND, {"dp": S(0)}, grad=True)
        loss = contrastive(
            all_gather(images_ND, "dp", src=S(0), dst=I),
            all_gather(texts_ND, "dp", src=S(0), dst=I),
        )
        loss.backward()
        return {"loss": loss, "images.grad": images_ND.grad, "texts.grad": texts_ND.grad}


BUGS = (MeanOfMeans, SkippedFactor, AveragedInOptimizer, GatheredFeatures)
