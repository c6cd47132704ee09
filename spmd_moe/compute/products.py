"""One product of two matrices on a CPU, by what this processor is fast at.

torch multiplies matrices of float32 by one library, MKL, and those of half precision by
another, oneDNN. Which of them is fast depends on the processor, so the ways are chosen
here, by a table of what was measured:

- Half precision on a processor that has instructions for it: as it is, 2 to 5 times as
  fast as widened. On one without, it is widened to float32: 7 to 100 times as fast.
- float32 on an AMD processor with AVX-512, where MKL reaches half of what oneDNN does:
  - a product that is large enough to pay for being handed over, 50 us, goes to oneDNN;
  - for a few rows MKL reads a matrix that lies along its columns at half the speed of
    memory, but at full speed if the matrix comes first: (W x^T)^T;
  - the gradient of a large matrix from a few rows takes MKL as long as from 30, so the
    rows are added one by one.

The choice is a pure function of the dtype, the sizes and the processor. Nothing is timed
when a program runs, so equal operands give equal bits in every run, and on every rank whose
processor and number of threads are the same.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

# From so many multiplications and rows oneDNN pays: of rows with a matrix as a Linear holds
# it, and of others, which it must first put in order.
ONEDNN_ALONG, ONEDNN_ACROSS = (3_500_000, 7), (128_000_000, 128)
# So many rows are few: for a product, and for the gradient of a matrix of at least so much.
FEW_ROWS, FEW_FOR_GRADIENT, LARGE_MATRIX = range(2, 7), range(2, 5), 2**18


@cache
def processor() -> Mapping[str, Any]:
    """Return what torch says of this processor; nothing on a torch that does not say."""
    say: Any = getattr(torch.cpu, "get_capabilities", None)
    return say() if say is not None else {}


@cache
def is_widened(dtype: torch.dtype) -> bool:
    """Return whether products of `dtype` are computed in float32."""
    known = processor()
    if dtype == torch.bfloat16:
        return not (known.get("avx512_bf16") or known.get("amx_bf16"))
    if dtype == torch.float16:
        return not (known.get("avx512_fp16") or known.get("amx_fp16"))
    return False


@cache
def has_slow_mkl() -> bool:
    """Return whether oneDNN multiplies float32 faster than MKL, which torch takes."""
    known = processor()
    return (
        "AMD" in str(known.get("cpu_name", ""))
        and bool(known.get("avx512_f"))
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
    )


@cache
def has_fast_batches(dtype: torch.dtype) -> bool:
    """Return whether a batch of products is faster than one by one."""
    return dtype in (torch.bfloat16, torch.float16) and not is_widened(dtype)


def product(rows_MK: Tensor, matrix_KN: Tensor, out: Tensor | None = None) -> Tensor:
    """rows @ matrix, or a batch of them, written to `out` if there is one.

    Where it may be differentiated, which is in a backward that is itself differentiated,
    it is a product of torch.
    """
    dtype = rows_MK.dtype
    if is_widened(dtype):
        found = (rows_MK.float() @ matrix_KN.float()).to(dtype)
    elif torch.is_grad_enabled():
        found = rows_MK @ matrix_KN
    elif dtype != torch.float32 or not has_slow_mkl():
        times = torch.mm if rows_MK.dim() == 2 else torch.bmm
        return times(rows_MK, matrix_KN, out=out)
    else:
        (m, k), n = rows_MK.shape, matrix_KN.shape[1]
        is_along = matrix_KN.stride(0) == 1 and rows_MK.stride(1) == 1
        work, least = ONEDNN_ALONG if is_along else ONEDNN_ACROSS
        if m * k * n >= work and min(m, k, n) >= least:
            found = linear(rows_MK.to_mkldnn(), matrix_KN.mT).to_dense()
        elif is_along and m in FEW_ROWS:
            found = torch.mm(matrix_KN.mT, rows_MK.mT).mT.contiguous()
        else:
            return torch.mm(rows_MK, matrix_KN, out=out)
    return found if out is None else out.copy_(found)


def outer(rows_MK: Tensor, grads_MN: Tensor, out: Tensor) -> Tensor:
    """rows^T @ grads, the gradient of a matrix, written to `out`."""
    is_slow = rows_MK.dtype == torch.float32 and has_slow_mkl()
    if is_slow and rows_MK.shape[0] in FEW_FOR_GRADIENT and out.numel() >= LARGE_MATRIX:
        torch.mul(rows_MK[0].unsqueeze(1), grads_MN[0], out=out)
        for row_K, grad_N in zip(rows_MK[1:], grads_MN[1:], strict=True):
            out.addr_(row_K, grad_N)
        return out
    return product(rows_MK.mT, grads_MN, out)
