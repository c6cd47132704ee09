"""Batched experts against the loop, and when a copy of the weights is made anew."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from placements import set_current_mesh, typecheck
from spmd_moe import MoE
from spmd_moe.compute.batched import Batched, WeightCache
from spmd_moe.compute.by_expert import ByExpert
from spmd_moe.experts import GroupedExperts
from tests.support.moe import CONFIG

EXPERTS = CONFIG.num_experts


def made(dtype: torch.dtype = torch.float32) -> tuple[GroupedExperts, Counter[str]]:
    """Experts that compute with a cache, and what their strategy tells."""
    told: Counter[str] = Counter()
    experts = MoE(replace(CONFIG, hidden_dim=6), dtype=dtype).experts
    experts.compute = Batched(WeightCache(experts), tell=lambda name: told.update([name]))
    return experts, told


def rows(each: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    counts_G = torch.full((EXPERTS,), each)
    return torch.randn(EXPERTS * each, CONFIG.dim).to(dtype), counts_G


def run(experts: GroupedExperts, x: Tensor, counts: Tensor) -> Tensor:
    with torch.no_grad():
        return experts(x, counts)


def by_loop(experts: GroupedExperts, x: Tensor, counts: Tensor) -> Tensor:
    w = experts.w1_GFD, experts.w3_GFD, experts.w2_GDF
    with torch.no_grad():
        return ByExpert()(x, *w, counts, None)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("each", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_counts_are_batched_and_equal_the_loop(
    cached: bool, each: int, dtype: torch.dtype
) -> None:
    experts, told = made(dtype)
    if not cached:
        experts.compute = Batched(tell=lambda name: told.update([name]))
    x, counts = rows(each, dtype)
    close = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for _ in range(2):
        found = run(experts, x, counts)
        torch.testing.assert_close(
            found, by_loop(experts, x, counts), rtol=close, atol=close
        )
    with torch.no_grad():
        known = experts(x, counts, [each] * EXPERTS)
    assert torch.equal(found, known)
    # where half precision is widened, the loop is what is fast
    assert told["batched_no_grad_experts"] in ((3,) if dtype != torch.bfloat16 else (0, 3))


def test_other_counts_gradients_types_and_no_rows_take_the_other_way() -> None:
    experts, told = made()
    x, counts = rows(2)
    uneven = counts.clone()
    uneven[0], uneven[1] = 1, 3
    torch.testing.assert_close(run(experts, x, uneven), by_loop(experts, x, uneven))
    assert run(experts, x[:0], counts * 0).shape == (0, CONFIG.dim)
    empty = x[:0].requires_grad_()
    experts(empty, counts * 0).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())
    assert not told
    with set_current_mesh({}), typecheck(), torch.no_grad():
        torch.testing.assert_close(experts(x, counts), by_loop(experts, x, counts))


def test_copies_are_made_once_and_anew_for_the_weight_that_was_written() -> None:
    experts, told = made()
    x, counts = rows(3)
    run(experts, x, counts)
    run(experts, x, counts)
    assert told["cached_w13_miss"] == told["cached_w13_hit"] == 1
    assert told["cached_w2_t_miss"] == told["cached_w2_t_hit"] == 1
    with torch.no_grad():
        experts.w1_GFD.add_(1)
    found = run(experts, x, counts)
    torch.testing.assert_close(found, by_loop(experts, x, counts))
    assert (told["cached_w13_miss"], told["cached_w13_hit"]) == (2, 1)
    assert (told["cached_w2_t_miss"], told["cached_w2_t_hit"]) == (1, 2)
    assert told["batched_no_grad_experts"] == 3


def test_a_call_with_gradients_neither_uses_nor_drops_the_copies() -> None:
    experts, told = made()
    x, counts = rows(3)
    run(experts, x, counts)
    experts(x, counts).sum().backward()
    assert told["cached_w13_hit"] == 0 and told["batched_no_grad_experts"] == 1
    run(experts, x, counts)
    assert told["cached_w13_hit"] == 1


def uncounted(experts: GroupedExperts) -> None:
    """Write as torch does not count."""
    experts.w1_GFD.data.add_(1)


def loaded(experts: GroupedExperts) -> None:
    state = {name: x.clone() for name, x in experts.state_dict().items()}
    uncounted(experts)
    experts.load_state_dict(state)


def trained(experts: GroupedExperts) -> None:
    uncounted(experts)
    experts.train().eval()


def stepped(experts: GroupedExperts) -> None:
    uncounted(experts)
    other = torch.zeros(1, requires_grad=True)
    torch.optim.SGD([other], lr=1.0).step()


def moved(experts: GroupedExperts) -> None:
    experts.w1_GFD.data = experts.w1_GFD.data.clone() + 1


def forgotten(experts: GroupedExperts) -> None:
    uncounted(experts)
    experts.compute.forget()


@pytest.mark.parametrize("change", [loaded, trained, stepped, moved, forgotten])
def test_what_may_write_uncounted_empties_the_cache(change: object) -> None:
    assert callable(change)
    experts, told = made()
    x, counts = rows(3)
    run(experts, x, counts)
    change(experts)
    torch.testing.assert_close(run(experts, x, counts), by_loop(experts, x, counts))
    assert told["cached_w13_miss"] == 2 and told["cached_w13_hit"] == 0


def test_a_weight_that_is_another_object_is_not_cached() -> None:
    """FSDP2 and autocast bring weights of their own."""
    experts, told = made()
    x, counts = rows(3)
    with torch.autocast("cpu", torch.bfloat16):
        run(experts, x, counts)
    experts.w1_GFD = torch.nn.Parameter(experts.w1_GFD.detach() + 1)
    torch.testing.assert_close(run(experts, x, counts), by_loop(experts, x, counts))
    assert told["cached_w13_miss"] == told["cached_w13_hit"] == 0


def test_nothing_is_kept_of_inference_tensors() -> None:
    with torch.inference_mode():
        experts, told = made()
    x, counts = rows(3)
    for _ in range(2):
        run(experts, x, counts)
    assert told["cached_w13_hit"] == 0 and told["cached_w13_miss"] == 0


def test_a_cache_is_no_part_of_the_state_and_goes_with_its_module() -> None:
    experts, _ = made()
    before = set(experts.state_dict())
    run(experts, *rows(3))
    assert set(experts.state_dict()) == before
    with pytest.raises(TypeError, match="under FSDP2 use Batched"):
        odd = torch.nn.Module()
        odd.register_parameter(
            "w", type("Sharded", (torch.nn.Parameter,), {})(torch.ones(1))
        )
        WeightCache(odd)
