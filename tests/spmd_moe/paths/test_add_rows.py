"""Rows are added in place only where nobody could notice (seeds.md 5.1.9)."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from spmd_moe import MoE
from spmd_moe.paths.add_rows import add_rows, deterministic, shares_memory
from spmd_moe.paths.recorder import recording
from tests.support.moe import CONFIG

INDEX = torch.tensor([0, 2, 0, 1])
ROWS = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
SUMS = [[6.0, 8.0], [7.0, 8.0], [3.0, 4.0]]


def test_by_hand_in_place() -> None:
    out = torch.zeros(3, 2)
    with torch.no_grad(), recording() as recorder:
        found = add_rows(out, INDEX, ROWS, keep=ROWS)
    assert found.tolist() == SUMS and found.data_ptr() == out.data_ptr()
    assert recorder.counts() == {"add_rows_in_place": 1}


def test_with_gradients_on_it_is_another_tensor_with_a_backward() -> None:
    out, rows = torch.zeros(3, 2, requires_grad=True), ROWS.clone().requires_grad_()
    with recording() as recorder:
        found = add_rows(out, INDEX, rows, keep=ROWS)
    assert found.tolist() == SUMS and not out.any()
    assert recorder.counts() == {"add_rows_out_of_place": 1}
    gradient = torch.arange(6.0).view(3, 2)
    (found * gradient).sum().backward()
    assert out.grad is not None and torch.equal(out.grad, gradient)
    assert rows.grad is not None and torch.equal(rows.grad, gradient[INDEX])


@pytest.mark.parametrize("kept", ["itself", "a view", "another part"])
def test_what_must_stay_as_it_is_stays(kept: str) -> None:
    whole = torch.ones(6, 2)
    out = whole[:3]
    keep = {"itself": out, "a view": out.view(-1), "another part": whole[3:]}[kept]
    with torch.no_grad(), recording() as recorder:
        found = add_rows(out, INDEX, ROWS, keep=keep)
    assert whole.eq(1).all() and (found - 1).tolist() == SUMS
    assert recorder.counts() == {"add_rows_out_of_place": 1}


def test_rows_of_the_same_memory_are_added_to_a_copy() -> None:
    whole = torch.ones(3, 2)
    with torch.no_grad():
        found = add_rows(whole, torch.tensor([0, 0, 1]), whole, keep=ROWS)
    assert found.tolist() == [[3.0, 3.0], [2.0, 2.0], [1.0, 1.0]] and whole.eq(1).all()


def test_tensors_without_memory_count_as_shared() -> None:
    assert shares_memory(torch.empty(0, 2), torch.empty(0, 2))
    with FakeTensorMode(), torch.no_grad():
        found = add_rows(torch.ones(3, 2), torch.zeros(4).long(), torch.ones(4, 2),
                         keep=torch.ones(1))  # fmt: skip
    assert found.shape == (3, 2)


@pytest.mark.parametrize("before", [(False, False), (True, False), (True, True)])
def test_the_deterministic_mode_is_restored(before: tuple[bool, bool]) -> None:
    is_on, warns = before
    torch.use_deterministic_algorithms(is_on, warn_only=warns)
    try:
        with pytest.raises(RuntimeError, match="inside"), deterministic():
            assert torch.are_deterministic_algorithms_enabled()
            raise RuntimeError("inside")
        assert torch.are_deterministic_algorithms_enabled() == is_on
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warns
    finally:
        torch.use_deterministic_algorithms(False)


class Scaled(nn.Module):
    """Shared experts that return their input times a factor, or the input itself."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.made: Tensor | None = None

    def forward(self, x_TD: Tensor) -> Tensor:
        self.made = x_TD if self.factor == 1 else x_TD * self.factor
        return self.made


class Identity(nn.Module):
    def forward(self, rows_MD: Tensor, *_: object) -> Tensor:
        return rows_MD


@pytest.mark.parametrize(("factor", "path"), [(1.0, "out_of"), (0.25, "in")])
def test_shared_experts_that_return_their_input_leave_it(factor: float, path: str) -> None:
    config = replace(CONFIG, combine_in_place=True, top_k=1, route_norm=True)
    moe = MoE(config).double()
    shared = Scaled(factor)
    moe.experts, moe.shared_experts = Identity(), shared  # type: ignore[assignment]
    x = torch.randint(-9, 9, (5, 8)).double()
    kept = x.clone()
    with torch.no_grad(), recording() as recorder:
        y = moe(x, seq_len=5)
    assert torch.equal(x, kept)
    torch.testing.assert_close(y, (1 + factor) * kept, rtol=1e-12, atol=1e-12)
    assert recorder.counts() == {f"add_rows_{path}_place": 1}
    assert shared.made is not None
    assert shares_memory(y, shared.made) == (path == "in")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_in_the_dtype_of_the_rows_are_asked_for(dtype: torch.dtype) -> None:
    narrow, wide = (
        MoE(replace(CONFIG, narrow_gates=on), dtype=dtype) for on in (True, False)
    )
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    with recording() as recorder:
        y = narrow(x, seq_len=6)
    assert recorder.counts() == (
        {} if dtype == torch.float32 else {"gates_in_narrow_dtype": 1}
    )
    expected = wide(x, seq_len=6)
    assert y.dtype == expected.dtype == dtype
    tolerance = 0 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("before", [False, True])
def test_in_place_equals_the_plain_sum(before: bool) -> None:
    config = replace(CONFIG, score_before_experts=before)
    plain = MoE(config).double()
    quick = MoE(replace(config, combine_in_place=True)).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    with torch.no_grad():
        y = quick(x, seq_len=5)
        torch.testing.assert_close(y, plain(x, seq_len=5), rtol=1e-12, atol=1e-12)
    with recording() as recorder:  # with gradients on, the plain sum runs
        assert torch.equal(quick(x, seq_len=5), plain(x, seq_len=5))
    assert recorder.counts() == {}
