"""What FSDP2 leaves behind: who would go on with it gets an error, not a wrong number."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import placements
from placements import (
    PlacementError,
    R,
    clip_grad_norm_,
    declare,
    reduce_gradients,
    set_current_mesh,
)
from placements.testing import device_mesh, run_ranks

X = torch.ones(4, 2, dtype=torch.float64)


class Weighted(nn.Module):
    def __init__(self, w: nn.Parameter | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 2, dtype=torch.float64)) if w is None else w
        declare(self, {"w": {"dp": R}})

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def error_of(call: Any, *args: Any) -> str:
    with set_current_mesh(device_mesh()), pytest.raises(PlacementError) as caught:
        call(*args)
    return str(caught.value)


def wrapped_twice() -> None:
    module = placements.fully_shard(Weighted())
    placements.fully_shard(module)


def block_after_the_whole() -> None:
    module = placements.fully_shard(nn.Sequential(Weighted(), Weighted()))
    placements.fully_shard(module[0])


def shared_by_two_wraps() -> None:
    first = Weighted()
    whole = nn.Sequential(first, Weighted(first.w))
    placements.fully_shard(first)
    placements.fully_shard(whole)


def with_a_gradient() -> None:
    module = Weighted()
    module(X).sum().backward()
    placements.fully_shard(module)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (wrapped_twice, "'w' is sharded already"),
        (block_after_the_whole, "'w' is sharded already"),
        (shared_by_two_wraps, "'1.w' is the tensor that an earlier call sharded as 'w'"),
        (with_a_gradient, "'w' has a gradient, which sharding would drop"),
    ],
)
def test_what_cannot_be_sharded_any_more(call: Any, message: str) -> None:
    for text in run_ranks({"dp": 2}, error_of, call):
        assert f"fully_shard: {message}" in text


def after_zero_grad() -> list[float]:
    with set_current_mesh(device_mesh()):
        module = Weighted()
        module(X).sum().backward()
        module.zero_grad(set_to_none=True)
        placements.fully_shard(module)
        module(X).sum().backward()
        reduce_gradients(module)
        return cast(Any, module.w.grad).full_tensor().unique().tolist()


def shared_in_one_wrap() -> list[float]:
    with set_current_mesh(device_mesh()):
        first = Weighted()
        whole = nn.Sequential(first, Weighted(first.w))
        placements.fully_shard(whole)
        whole(X).sum().backward()
        reduce_gradients(whole)
        return cast(Any, first.w.grad).full_tensor().unique().tolist()


def test_without_a_gradient_and_in_one_wrap_it_is_sharded() -> None:
    assert run_ranks({"dp": 2}, after_zero_grad) == [[2.0]] * 2
    assert run_ranks({"dp": 2}, shared_in_one_wrap) == [[4.0]] * 2  # (w * w)' on 2 ranks


def early_optimizer(kind: Any, **options: Any) -> None:
    module = Weighted()
    optimizer = kind(module.parameters(), lr=0.1, **options)
    placements.fully_shard(module)
    module(X).sum().backward()
    reduce_gradients(module)
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_that_was_made_before_is_refused(kind: Any) -> None:
    for text in run_ranks({"dp": 2}, error_of, early_optimizer, kind):
        assert f"{kind.__name__}.step: the optimizer holds 'w' as it was before" in text
        assert "make the optimizer after fully_shard" in text


def waiting(options: Any, put_off: str) -> tuple[list[str], list[float]]:
    """The errors of a step whose backward did not sum, and the gradient of the next."""
    with set_current_mesh(device_mesh()):
        module = Weighted()
        placements.fully_shard(module, **options)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        put: Any = getattr(cast(FSDPModule, module), put_off)
        put(False)
        module(X).sum().backward()
        errors: list[str] = []
        for call in (
            lambda: reduce_gradients(module),
            lambda: clip_grad_norm_(module, 1.0),
            optimizer.step,
        ):
            with pytest.raises(PlacementError) as caught:
                call()
            errors.append(str(caught.value).split(":")[0])
            assert "FSDP2 holds back the gradient of" in str(caught.value)
        put(True)
        module(X).sum().backward()
        reduce_gradients(module)
        clip_grad_norm_(module, 1e3)
        found = cast(Any, module.w.grad).full_tensor().unique().tolist()
        optimizer.step()
        return errors, found


@pytest.mark.parametrize(
    ("options", "put_off"),
    [
        ({}, "set_requires_gradient_sync"),
        ({"replicate": {"dp": 2}}, "set_requires_gradient_sync"),
        ({"replicate": {"dp": 2}}, "set_requires_all_reduce"),
    ],
)
@pytest.mark.parametrize("backend", ["simulated", "gloo"])
def test_a_step_without_the_sum_is_refused_and_the_next_one_is_whole(
    options: Any, put_off: str, backend: Any
) -> None:
    ranks = 4 if options else 2
    chosen: dict[str, Any] = {"backend": "gloo"} if backend == "gloo" else {}
    for errors, found in run_ranks({"dp": ranks}, waiting, options, put_off, **chosen):
        assert errors == ["reduce_gradients", "clip_grad_norm_", "SGD.step"]
        assert found == [2.0 * ranks]  # two backward passes on every rank
