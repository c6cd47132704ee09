"""The grouped matmul against the loop that defines it, values and gradients."""

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from placements import PlacementError, R, S, V, assert_type, set_current_mesh, typecheck
from spmd_moe import MoE
from spmd_moe.compute.grouped_mm import grouped_mm, grouped_mm_by_loop
from tests.support.moe import CONFIG


def operands(counts: list[int], k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Small integers, so that products are exact in every order."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)

    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    return draw(sum(counts), k), draw(len(counts), k, n), ends, draw(sum(counts), n)


def by_expert(rows: Tensor, matrices: Tensor, counts: list[int]) -> Tensor:
    parts = rows.split(counts)
    return torch.cat([p @ m for p, m in zip(parts, matrices.unbind(0), strict=True)])


@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=1, max_size=5),
    k=st.sampled_from([1, 3, 4, 8]),
    n=st.sampled_from([1, 3, 4, 8]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    transposed=st.booleans(),
    expanded=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_it_equals_one_matmul_per_group(
    counts: list[int],
    k: int,
    n: int,
    dtype: torch.dtype,
    transposed: bool,
    expanded: bool,
) -> None:
    rows, matrices, ends, grad = operands(counts, k, n, dtype)
    if transposed:
        matrices = matrices.mT.contiguous().mT
    if expanded:
        grad = torch.ones((), dtype=dtype).expand(grad.shape)
    found, wanted = [], []
    for results, function in ((found, grouped_mm), (wanted, None)):
        a, b = rows.clone().requires_grad_(), matrices.detach().requires_grad_()
        y: Any = function(a, b, ends) if function else by_expert(a, b, counts)
        y.backward(grad)
        results += [y, a.grad, torch.zeros_like(b) if b.grad is None else b.grad]
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    loop = grouped_mm_by_loop(rows, matrices, ends)
    torch.testing.assert_close(found[0], loop, rtol=0, atol=0)


def test_a_group_without_rows_has_the_gradient_zero() -> None:
    rows, matrices, ends, _ = operands([0, 0], 4, 4, torch.float32)
    matrices.requires_grad_()
    grouped_mm(rows, matrices, ends).sum().backward()
    assert matrices.grad is not None and matrices.grad.abs().sum() == 0


def test_other_numbers_of_groups_are_refused() -> None:
    rows, matrices, ends, _ = operands([1, 2], 4, 4, torch.float32)
    with pytest.raises(ValueError, match="2 groups of rows, but 1 matrices"):
        grouped_mm(rows, matrices[:1], ends)


def test_rows_of_other_ranks_experts_are_refused() -> None:
    """Experts cut over ep need this rank's own rows; all ranks' rows are not those."""
    rows, matrices, ends, _ = operands([1, 2], 4, 4, torch.float32)
    with set_current_mesh({"ep": 2}), typecheck():
        assert_type(rows, {"ep": R})
        assert_type(matrices, {"ep": S(0)})
        assert_type(ends, {"ep": V})
        with pytest.raises(PlacementError) as caught:
            grouped_mm(rows, matrices, ends)
    assert caught.value.axis == "ep" and caught.value.expected == "Varying"


def test_it_has_a_fake_and_runs_on_meta_tensors() -> None:
    rows, matrices, ends, _ = operands([1, 2], 4, 4, torch.float32)
    found = grouped_mm(rows.to("meta"), matrices.to("meta"), ends.to("meta"))
    assert found.shape == (3, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ends", [[2, 3], [2, 5]])
def test_groups_that_are_not_the_rows_are_refused(
    dtype: torch.dtype, ends: list[int]
) -> None:
    rows_MK, matrices_GKN = torch.ones(4, 8, dtype=dtype), torch.ones(2, 8, 8, dtype=dtype)
    with pytest.raises(ValueError, match="but there are 4"):
        grouped_mm(rows_MK, matrices_GKN, torch.tensor(ends, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("counts", [[5, -2, 0, 0], [-1, 4, 0, 0], [0, 0, 4, -1]])
def test_counts_below_zero_are_refused(dtype: torch.dtype, counts: list[int]) -> None:
    experts = MoE(replace(CONFIG, hidden_dim=8), dtype=dtype).experts
    with pytest.raises(ValueError, match=r"group \d has -\d rows, but no count"):
        experts(torch.ones(3, 8, dtype=dtype), torch.tensor(counts))


@pytest.mark.parametrize("counts", [[1.0, 1.0, 1.0, 0.0], [True, True, True, False]])
def test_counts_that_are_no_integers_are_refused(counts: list[Any]) -> None:
    experts = MoE(CONFIG).experts
    with pytest.raises(TypeError, match=r"the counts are torch.* must be integers"):
        experts(torch.ones(3, 8), torch.tensor(counts))
    ends = torch.tensor([1.0, 2.0, 3.0, 3.0])
    with pytest.raises(TypeError, match=r"the ends of the groups are torch\.float32"):
        grouped_mm(torch.ones(3, 8), experts.w1_GFD.mT, ends)
