"""C8 for the peers: a rank without tokens leaves the step that all ranks must make."""

# torch does not type `backward` and the functional collectives:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from placements import I, P, V, all_reduce, all_to_all, reinterpret
from placements.testing import device_mesh
from spmd_moe.bugs.peers.words import loaded, locally
from spmd_moe.bugs.programs.c08_lockstep import SENT, W_EDD, X_TD
from spmd_moe.bugs.record import Results, mine

Expert = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
OWN_TD, W0_EDD, W1_EDD = X_TD.view(3, 2, 3), W_EDD, W_EDD + 1


def splits() -> tuple[list[int], list[int]]:
    """How many rows go to each rank, and come from each."""
    rank = dist.get_rank()
    return SENT[rank], [row[rank] for row in SENT]


def run_step(expert: Expert) -> Results:
    sent, received = splits()
    x_TD = mine(OWN_TD, {"ep": V}, grad=True)
    w0_DD = mine(W0_EDD, {"ep": V}, grad=True)
    w1_DD = mine(W1_EDD, {"ep": V}, grad=True)

    def body() -> Tensor:
        rows_MD = all_to_all(
            x_TD, "ep", input_split_sizes=sent, output_split_sizes=received
        )
        rows_MD = expert(rows_MD, x_TD, w0_DD, w1_DD)
        y_TD = all_to_all(
            rows_MD, "ep", input_split_sizes=received, output_split_sizes=sent
        )
        return reinterpret((x_TD + y_TD).sum(), "ep", src=V, dst=P)

    all_reduce(locally(body, {"ep": P}), "ep", src=P, dst=I).backward()
    return {"x.grad": x_TD.grad, "w0.grad": w0_DD.grad, "w1.grad": w1_DD.grad}


def run_local_step(expert: Expert) -> Results:
    """What a region of DTensor holds: plain tensors, and torch's own exchange."""
    sent, received = splits()
    group = device_mesh().get_group("ep")
    x_TD = loaded(OWN_TD.unbind()).requires_grad_()
    w0_DD = loaded(W0_EDD.unbind()).requires_grad_()
    w1_DD = loaded(W1_EDD.unbind()).requires_grad_()
    rows_MD = all_to_all_single_autograd(x_TD, received, sent, group) * 1  # waits
    rows_MD = expert(rows_MD, x_TD, w0_DD, w1_DD)
    y_TD = all_to_all_single_autograd(rows_MD, sent, received, group)
    (x_TD + y_TD).sum().backward()
    return {"x.grad": x_TD.grad, "w0.grad": w0_DD.grad, "w1.grad": w1_DD.grad}


def two_experts(rows_MD: Tensor, x_TD: Tensor, w0_DD: Tensor, w1_DD: Tensor) -> Tensor:
    return torch.cat([rows_MD[:1] @ w0_DD, rows_MD[1:] @ w1_DD])


def bypassed(rows_MD: Tensor, x_TD: Tensor, w0_DD: Tensor, w1_DD: Tensor) -> Tensor:
    if rows_MD.shape[0] == 0:
        return x_TD[:0] * 0 + 0 * w0_DD.sum() + 0 * w1_DD.sum()
    return two_experts(rows_MD, x_TD, w0_DD, w1_DD)


def skipped(rows_MD: Tensor, x_TD: Tensor, w0_DD: Tensor, w1_DD: Tensor) -> Tensor:
    if rows_MD.shape[0] == 0:
        return torch.zeros_like(rows_MD)
    return two_experts(rows_MD, x_TD, w0_DD, w1_DD)


def one_dummy(rows_MD: Tensor, x_TD: Tensor, w0_DD: Tensor, w1_DD: Tensor) -> Tensor:
    if rows_MD.shape[0] == 0:
        return rows_MD * 0 + 0 * w0_DD.sum()
    return two_experts(rows_MD, x_TD, w0_DD, w1_DD)


class B53:
    @staticmethod
    def wrong_for_peers() -> Results:
        return run_step(bypassed)

    @staticmethod
    def right_for_peers() -> Results:
        return run_step(two_experts)

    @staticmethod
    def wrong_for_dtensor() -> Results:
        return run_local_step(bypassed)

    @staticmethod
    def right_for_dtensor() -> Results:
        return run_local_step(two_experts)


class B55:
    @staticmethod
    def wrong_for_peers() -> Results:
        return run_step(skipped)

    @staticmethod
    def right_for_peers() -> Results:
        return run_step(two_experts)

    @staticmethod
    def wrong_for_dtensor() -> Results:
        return run_local_step(skipped)

    @staticmethod
    def right_for_dtensor() -> Results:
        return run_local_step(two_experts)


class B56:
    @staticmethod
    def wrong_for_peers() -> Results:
        return run_step(one_dummy)

    @staticmethod
    def right_for_peers() -> Results:
        return run_step(two_experts)

    @staticmethod
    def wrong_for_dtensor() -> Results:
        return run_local_step(one_dummy)

    @staticmethod
    def right_for_dtensor() -> Results:
        return run_local_step(two_experts)
