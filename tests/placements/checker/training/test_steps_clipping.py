"""Clipping by torch's own functions, between backward and step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from placements import reduce_gradients
from placements.testing import RankFailure, run_ranks
from tests.support.trained import AXES, TYPES, WHOLE, Trained, on_a_rank, on_one_device
from tests.support.trained_equal import check_equal

Clip = Callable[[nn.Module], object]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def by_norm(foreach: bool) -> Clip:
    return lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5, foreach=foreach)


def by_value(foreach: bool) -> Clip:
    return lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.5, foreach=foreach)


def trained(clip: Clip, types: dict[str, Any], reduces: bool = True) -> list[Trained]:
    def then(model: nn.Module) -> None:
        if reduces:
            reduce_gradients(model)
        clip(model)

    return run_ranks(AXES, on_a_rank, sgd, then, types)


FOREACH = pytest.mark.parametrize("foreach", [True, False])


@FOREACH
@pytest.mark.parametrize(
    ("clip", "types"),
    [(by_norm, WHOLE), (by_value, WHOLE), (by_value, TYPES)],
    ids=["norm of whole", "value of whole", "value of pieces"],
)
def test_clipping_is_that_of_one_device(
    clip: Callable[[bool], Clip], types: dict[str, Any], foreach: bool
) -> None:
    one = on_one_device(sgd, clip(False))
    check_equal(trained(clip(foreach), types), one, types)


@FOREACH
@pytest.mark.parametrize("clip", [by_norm, by_value])
def test_clipping_before_the_sum_is_told_to_reduce(
    clip: Callable[[bool], Clip], foreach: bool
) -> None:
    with pytest.raises(RankFailure) as failure:
        trained(clip(foreach), TYPES, reduces=False)
    assert "is Partial on axis 'dp'" in str(failure.value)
    assert "fix       reduce_gradients(module)" in str(failure.value)


@FOREACH
def test_the_norm_of_pieces_is_told_the_norm_over_ranks(foreach: bool) -> None:
    with pytest.raises(RankFailure, match=r"placements\.clip_grad_norm_ takes that of"):
        trained(by_norm(foreach), TYPES)


def total(model: nn.Module) -> None:
    found = nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None]
    )
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, found)


def test_the_total_norm_is_that_of_one_device() -> None:
    check_equal(trained(total, WHOLE), on_one_device(sgd, by_norm(False)), WHOLE)
