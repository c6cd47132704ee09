"""The experts expert by expert against the plain ops: values, gradients, what is refused."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from spmd_moe.compute import products
from spmd_moe.compute.by_expert import AbstractExpertCompute, ByExpert, Plain
from spmd_moe.compute.grouped_mm import in_autocast_dtype

TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 5e-3,
}


def operands(counts: list[int], dim: int, hidden: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(sum(counts), dim), (len(counts), hidden, dim), (len(counts), hidden, dim)]
    shapes.append((len(counts), dim, hidden))
    return [(torch.randn(s) / s[-1] ** 0.5).to(dtype).requires_grad_() for s in shapes]


def with_gradients(
    compute: AbstractExpertCompute, tensors: list[Tensor], counts: list[int], *, known: bool
) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    rows, w1, w3, w2 = leaves
    y = compute(rows, w1, w3, w2, torch.tensor(counts), counts if known else None)
    y.backward(torch.cos(torch.arange(y.numel())).view(y.shape).to(y.dtype))
    return [y.detach(), *(g for x in leaves if (g := x.grad) is not None)]


def same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted) == 5
    for a, b in zip(found, wanted, strict=True):
        close = TOLERANCES[b.dtype]
        most = float(b.abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=close, atol=close * most)


@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 3, 5, 7, 9]), min_size=1, max_size=5),
    dim=st.sampled_from([1, 3, 8]),
    hidden=st.sampled_from([1, 4, 6]),
    dtype=st.sampled_from(list(TOLERANCES)),
    known=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_it_equals_the_plain_ops(
    counts: list[int], dim: int, hidden: int, dtype: torch.dtype, known: bool
) -> None:
    tensors = operands(counts, dim, hidden, dtype)
    found = with_gradients(ByExpert(), tensors, counts, known=known)
    same(found, with_gradients(Plain(), tensors, counts, known=known))
    rows, w1, w3, w2 = tensors
    with torch.no_grad():
        quiet = ByExpert()(rows, w1, w3, w2, torch.tensor(counts), None)
    same([quiet] * 5, [found[0]] * 5)


@pytest.mark.parametrize("slow_mkl", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4, 5, 6, 7, 130])
def test_every_way_of_a_product_is_the_product(
    count: int, slow_mkl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes on both sides of every threshold; the ways of AMD are right on all processors."""
    monkeypatch.setattr(products, "has_slow_mkl", lambda: slow_mkl)
    counts = [count, 0, 1]
    tensors = operands(counts, 512, 1024, torch.float32)
    found = with_gradients(ByExpert(), tensors, counts, known=True)
    wide = [x.detach().double() for x in tensors]
    for a, b in zip(found, with_gradients(Plain(), wide, counts, known=True), strict=True):
        torch.testing.assert_close(
            a.double(), b, rtol=1e-4, atol=1e-5 * float(b.abs().max())
        )


@pytest.mark.parametrize("widened", [False, True])
def test_half_precision_as_it_is_and_widened(
    widened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        products, "is_widened", lambda dtype: widened and dtype == torch.bfloat16
    )
    tensors = operands([40, 0, 9], 32, 16, torch.bfloat16)
    found = with_gradients(ByExpert(), tensors, [40, 0, 9], known=True)
    wide = [x.detach().float() for x in tensors]
    for a, b in zip(
        found, with_gradients(Plain(), wide, [40, 0, 9], known=True), strict=True
    ):
        torch.testing.assert_close(
            a.float(), b, rtol=5e-2, atol=2e-2 * float(b.abs().max())
        )


def test_equal_operands_give_equal_bits() -> None:
    tensors = operands([9, 0, 3, 40], 64, 48, torch.float32)
    first = with_gradients(ByExpert(), tensors, [9, 0, 3, 40], known=True)
    again = with_gradients(ByExpert(), tensors, [9, 0, 3, 40], known=False)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_only_what_is_wanted_gets_a_gradient() -> None:
    for wanted in range(4):
        rows, w1, w3, w2 = leaves = [
            x.detach().requires_grad_(k == wanted)
            for k, x in enumerate(operands([2, 0, 3], 4, 6, torch.float64))
        ]
        ByExpert()(rows, w1, w3, w2, torch.tensor([2, 0, 3]), None).sum().backward()
        assert [x.grad is not None for x in leaves] == [k == wanted for k in range(4)]


def test_its_gradient_has_a_gradient() -> None:
    rows, w1, w3, w2 = operands([2, 0, 3], 4, 6, torch.float64)

    def run(*tensors: Tensor) -> Tensor:
        rows, w1, w3, w2 = tensors
        return ByExpert()(rows, w1, w3, w2, torch.tensor([2, 0, 3]), None)

    assert torch.autograd.gradcheck(run, (rows, w1, w3, w2))
    assert torch.autograd.gradgradcheck(run, (rows, w1, w3, w2))


def test_autocast_computes_in_its_dtype_and_backward_does_not_ask_it() -> None:
    tensors = operands([20, 3], 8, 8, torch.float32)
    results: list[list[Tensor]] = []
    for compute in (ByExpert(), Plain()):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(with_gradients(compute, tensors, [20, 3], known=False))
        assert results[-1][0].dtype == torch.bfloat16
        assert all(g.dtype == torch.float32 for g in results[-1][1:])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=2e-2 * float(b.abs().max()))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([1, 2], "3 rows, but there are 4"),
        ([5, -1], "group 1 has -1 rows"),
        ([4], "1 groups"),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_counts_of_other_rows_are_refused(
    counts: list[int], message: str, known: bool
) -> None:
    rows, w1, w3, w2 = operands([2, 2], 4, 6, torch.float32)
    with pytest.raises(ValueError, match=message):
        ByExpert()(rows, w1, w3, w2, torch.tensor(counts), counts if known else None)


def test_operands_of_two_dtypes_are_refused() -> None:
    rows, w1, w3, w2 = operands([2, 2], 4, 6, torch.float32)
    with pytest.raises(TypeError, match="must have one dtype"):
        ByExpert()(rows.double(), w1, w3, w2, torch.tensor([2, 2]), None)
    assert in_autocast_dtype(rows, w1)[0] is rows


def test_the_choice_depends_on_the_processor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[tuple[dict[str, Any], bool, bool]] = [
        ({}, True, False),
        ({"cpu_name": "AMD EPYC", "avx512_f": True, "avx512_bf16": True}, False, True),
        ({"cpu_name": "AMD EPYC", "avx512_f": False}, True, False),
        ({"cpu_name": "Intel Xeon", "avx512_f": True, "amx_bf16": True}, False, False),
    ]
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    for says, widened, slow in known:
        monkeypatch.setattr(products, "processor", lambda says=says: says)
        assert products.is_widened.__wrapped__(torch.bfloat16) == widened
        assert products.has_slow_mkl.__wrapped__() == slow
