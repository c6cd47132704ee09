"""C14: which expert a saved tensor is."""

# torch does not type `backward`:
# pyright: reportUnknownMemberType=false

import torch
from torch import Tensor, nn

from placements import (
    I,
    P,
    R,
    S,
    V,
    all_reduce,
    assert_type,
    declare,
    global_state_dict,
    load_global_state_dict,
)
from spmd_moe.bugs.record import KIT, TYPES, Refused, Results, bug, mine, numbers

W_ED, X_ED = numbers(4, 3), numbers(4, 3, seed=1)
OWN_WGD = W_ED.view(2, 2, 3)  # two experts for each of two ranks
ZEROS_ED = torch.zeros_like(W_ED)


class ListedExperts(nn.Module):
    """The experts of this rank, numbered from 0 on each."""

    def __init__(self, w_GD: Tensor) -> None:
        super().__init__()
        self.experts = nn.ParameterList(w_GD.unbind(0))


class StackedExperts(nn.Module):
    """The experts of this rank in one tensor, which is cut over ep."""

    def __init__(self, w_GD: Tensor) -> None:
        super().__init__()
        self.w_GD = nn.Parameter(w_GD)
        declare(self, {"w_GD": {"ep": S(0)}})

    def forward(self, x_GD: Tensor) -> Tensor:
        return x_GD * self.w_GD


@bug(
    "B74",
    "KempnerForge #202",
    "C14",
    "every ep rank saves its experts under the same names",
    mesh={"ep": 2},
    refused=Refused(TYPES, None, "experts.0", "share a name"),
    results={"saved_ED": {"ep": R}, "w.grad": {"ep": S(0)}},
)
class SameNames:
    @staticmethod
    def one_device() -> Results:
        w_ED = W_ED.clone().requires_grad_()
        ((X_ED * w_ED) ** 2).sum().backward()
        return {"saved_ED": w_ED.detach(), "w.grad": w_ED.grad}

    @staticmethod
    def wrong() -> None:
        module = ListedExperts(mine(OWN_WGD, {"ep": V}))
        declare(module, {"experts.0": {"ep": R}, "experts.1": {"ep": R}})
        global_state_dict(module)

    @staticmethod
    def right() -> Results:
        saved = global_state_dict(StackedExperts(mine(W_ED, {"ep": S(0)})))
        resumed = StackedExperts(mine(ZEROS_ED, {"ep": S(0)}))
        load_global_state_dict(resumed, saved)
        loss = (resumed(mine(X_ED, {"ep": S(0)})) ** 2).sum()
        all_reduce(loss, "ep", src=P, dst=I).backward()
        saved_ED = assert_type(saved["w_GD"], {"ep": R})
        return {"saved_ED": saved_ED, "w.grad": resumed.w_GD.grad}


W12_ED, X12_ED = numbers(12, 3), numbers(12, 3, seed=1)
ZEROS12_ED = torch.zeros_like(W12_ED)
# A checkpoint by expert; ids are parts of names, so they are text.
BY_NAME = {f"experts.{e}": w_D for e, w_D in enumerate(W12_ED)}


def loaded(names: list[str]) -> Results:
    """Stack the experts of these names, load them on ep, and run them."""
    w_ED = torch.stack([mine(BY_NAME[name], {"ep": R}) for name in names])
    module = StackedExperts(mine(ZEROS12_ED, {"ep": S(0)}))
    load_global_state_dict(module, {"w_GD": w_ED})
    y_GD = module(mine(X12_ED, {"ep": S(0)}))
    all_reduce((y_GD**2).sum(), "ep", src=P, dst=I).backward()
    return {"y_GD": y_GD, "w.grad": module.w_GD.grad}


@bug(
    "B76",
    "torchtitan #1918",
    "C14",
    "experts of a checkpoint are stacked in the order of their names",
    mesh={"ep": 2},
    refused=Refused(KIT, None, "y_GD", "not that of one device"),
    results={"y_GD": {"ep": S(0)}, "w.grad": {"ep": S(0)}},
)
class OrderOfNames:
    @staticmethod
    def one_device() -> Results:
        w_ED = W12_ED.clone().requires_grad_()
        y_ED = X12_ED * w_ED
        (y_ED**2).sum().backward()
        return {"y_GD": y_ED.detach(), "w.grad": w_ED.grad}

    @staticmethod
    def wrong() -> Results:
        return loaded(sorted(BY_NAME))

    @staticmethod
    def right() -> Results:
        return loaded(sorted(BY_NAME, key=lambda name: int(name.rpartition(".")[2])))


BUGS = (SameNames, OrderOfNames)
