"""One global sum over one global count: the mean of one device, value and gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor

from placements import (
    I,
    P,
    PlacementError,
    R,
    S,
    V,
    all_reduce,
    assert_type,
    global_mean,
    ledger,
    set_current_mesh,
    split,
    type_of,
    typecheck,
)
from placements.testing import RankFailure, device_mesh, run_ranks
from placements.types.extents import Padded, Ragged

# 7 tokens over 2 dp ranks are 4 and 3, and of them unequal numbers are valid.
LOSSES = torch.tensor([3.0, 5.0, 7.0, 11.0, 2.0, 4.0, 8.0], dtype=torch.float64)
VALID = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
TYPES: dict[str, Any] = {"dp": S(0, Padded(7)), "cp": I}
# 1.0 / 5 is not a float64; the one-device program divides the same numbers.
MEAN, GRADIENT = (LOSSES * VALID).sum() / VALID.sum(), VALID * 2 * LOSSES / VALID.sum()


def mean_and_gradient(options: dict[str, Any], checked: bool) -> tuple[Any, ...]:
    mesh = device_mesh()
    with set_current_mesh(mesh) as here:
        assert here is not None
        place = mesh.get_rank()
        x_T = split(LOSSES, TYPES, here)[place].requires_grad_()
        valid_T = split(VALID, TYPES, here)[place]
        with typecheck() if checked else ledger(), ledger() as record:
            assert_type(x_T, TYPES)
            assert_type(valid_T, TYPES)
            total, count = (x_T * x_T * valid_T).sum(), valid_T.sum()
            mean = global_mean(total, count, "dp", **options)
            found = dict(type_of(mean) or {})
            forward = len(record.entries)
            torch.autograd.backward(mean)
    return mean.detach(), x_T.grad, found, forward


def expected() -> tuple[Tensor, Tensor]:
    x_T = LOSSES.clone().requires_grad_()
    mean = (x_T * x_T * VALID).sum() / VALID.sum()
    torch.autograd.backward(mean)
    assert x_T.grad is not None
    return mean.detach(), x_T.grad


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_mean_and_gradient_equal_one_device(dp: int, checked: bool) -> None:
    mean, gradient = expected()
    ranks = run_ranks({"dp": dp, "cp": 1}, mean_and_gradient, {}, checked)
    assert all(torch.equal(found, mean) for found, *_ in ranks)
    assert torch.equal(torch.cat([grad for _, grad, *_ in ranks]), gradient)
    if checked and dp > 1:
        assert ranks[0][2] == {"dp": I}


def test_mean_on_gloo() -> None:
    mean, gradient = expected()
    ranks = run_ranks({"dp": 4, "cp": 1}, mean_and_gradient, {}, True, backend="gloo")
    assert all(torch.equal(found, mean) for found, *_ in ranks)
    assert torch.equal(torch.cat([grad for _, grad, *_ in ranks]), gradient)


def test_a_total_left_partial_sends_the_count_only() -> None:
    mean, gradient = expected()
    ranks = run_ranks({"dp": 2, "cp": 1}, mean_and_gradient, {"dst": P}, True)
    torch.testing.assert_close(sum(found for found, *_ in ranks), mean)
    assert torch.equal(torch.cat([grad for _, grad, *_ in ranks]), gradient)
    assert ranks[0][2] == {"dp": P} and ranks[0][3] == 1


def with_reduced_count(as_number: bool) -> tuple[Tensor, Tensor | None, int]:
    mesh = device_mesh()
    with set_current_mesh(mesh) as here, typecheck(), ledger() as record:
        assert here is not None
        place = mesh.get_rank()
        x_T = assert_type(split(LOSSES, TYPES, here)[place].requires_grad_(), TYPES)
        valid_T = assert_type(split(VALID, TYPES, here)[place], TYPES)
        total = (x_T * x_T * valid_T).sum()
        count = all_reduce(valid_T.sum(), "dp", src=P, dst=R)
        record.entries.clear()
        if as_number:
            mean = global_mean(total, count.item(), "dp")
        else:
            mean = global_mean(total, count, "dp", count_src=R)
        sent = len(record.entries)
        torch.autograd.backward(mean)
    return mean.detach(), x_T.grad, sent


@pytest.mark.parametrize("as_number", [False, True])
def test_a_count_that_is_reduced_already_is_not_reduced_again(as_number: bool) -> None:
    mean, gradient = expected()
    ranks = run_ranks({"dp": 2, "cp": 1}, with_reduced_count, as_number)
    assert all(torch.equal(found, mean) and sent == 1 for found, _, sent in ranks)
    grads = [grad for _, grad, _ in ranks if grad is not None]
    assert torch.equal(torch.cat(grads), gradient)


def over_two_axes(dst: Any) -> tuple[Tensor, Tensor | None]:
    mesh = device_mesh()
    types: dict[str, Any] = {"dp": S(0, Padded(7)), "cp": S(0)}
    with set_current_mesh(mesh) as here:
        assert here is not None
        place = mesh.get_rank()
        x_T = split(LOSSES, types, here)[place].requires_grad_()
        valid_T = split(VALID, types, here)[place]
        mean = global_mean(
            (x_T * x_T * valid_T).sum(), valid_T.sum(), ("dp", "cp"), dst=dst
        )
        # Of a Replicate, every rank uses its share: one number that the ranks' shares make.
        torch.autograd.backward(mean if dst is I else mean / 4)
    return mean.detach(), x_T.grad


@pytest.mark.parametrize("dst", [I, R])
def test_mean_over_two_axes(dst: Any) -> None:
    mean, gradient = expected()
    ranks = run_ranks({"dp": 2, "cp": 2}, over_two_axes, dst)
    assert all(torch.equal(found, mean) for found, _ in ranks)
    grads = [grad for _, grad in ranks if grad is not None]
    torch.testing.assert_close(torch.cat(grads), gradient)


def test_no_elements_give_nan_as_on_one_device() -> None:
    assert global_mean(torch.zeros(()), torch.zeros(()), "dp").isnan()


def test_dst_is_one_value() -> None:
    with pytest.raises(ValueError, match="must be I, R or P"):
        global_mean(torch.zeros(()), torch.ones(()), "dp", dst=V)


def mean_of_means() -> None:
    mesh = device_mesh()
    with set_current_mesh(mesh), typecheck():
        size = (4, 3)[mesh.get_rank()]
        x_T = assert_type(torch.ones(size), {"dp": S(0, Ragged(4, 3))})
        x_T.mean()


def test_a_mean_over_split_tokens_is_refused() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks({"dp": 2}, mean_of_means)
    assert isinstance(caught.value.cause, PlacementError)
