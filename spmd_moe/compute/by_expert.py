"""How the rows of the experts are computed: plainly, or expert by expert.

`plain_experts` is the definition, three grouped matmuls with silu between them. The checker
sees these ops, the compiler fuses them, and a GPU is fast at them.

`ByExpert` is what a CPU is fast at. It takes one expert at a time from its first product to
its last, because

- what lies between the products then stays in the cache. The whole of it would be memory
  that is fresh from the system, at ten times the price of memory in use;
- for backward only the products w1 x and w3 x are kept: what follows from them is computed
  again, which is cheaper than to fetch it;
- the gradients are written where they stay, each once. An expert without rows gets zeros.

It is used where its result cannot be told from the plain one but by rounding: on a CPU,
outside of compiled code. A strategy is an object that a
`GroupedExperts` has as `compute`; another may be put there.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import silu

from placements import AxisType, dual, in_transform, region, type_of, unchecked
from spmd_moe.compute.grouped_mm import (
    check_counts,
    check_groups,
    check_integers,
    ends_of,
    grouped_mm,
    in_autocast_dtype,
)
from spmd_moe.compute.products import outer, product
from spmd_moe.permute import is_dispatched, on_host
from spmd_moe.precision import autocast_dtype, without_autocast

# Rows for each expert below which products of half precision, which are short then, are
# better made by one call for all experts.
FEW_ROWS = 4


_NOWHERE: Mapping[str, AxisType] = {}


class AbstractExpertCompute(ABC):
    """What computes w2 (silu(w1 x) * (w3 x)) for the rows of each expert."""

    @abstractmethod
    def __call__(
        self,
        rows_MD: Tensor,
        w1_GFD: Tensor,
        w3_GFD: Tensor,
        w2_GDF: Tensor,
        counts_G: Tensor,
        counts_list: list[int] | None,
    ) -> Tensor:
        """Rows by expert, weights, rows of each expert -> rows."""

    def forget(self) -> None:  # noqa: B027 - most strategies keep nothing
        """Drop what is kept of weights, which may have been written."""


def plain_experts(
    rows_MD: Tensor, w1_GFD: Tensor, w3_GFD: Tensor, w2_GDF: Tensor, counts_G: Tensor
) -> Tensor:
    """Define what the experts compute, by ops that the checker knows."""
    ends_G = ends_of(counts_G)
    gate_MF = silu(grouped_mm(rows_MD, w1_GFD.mT, ends_G))
    hidden_MF = gate_MF * grouped_mm(rows_MD, w3_GFD.mT, ends_G)
    return grouped_mm(hidden_MF, w2_GDF.mT, ends_G)


def with_types_of_plain(
    compute: "AbstractExpertCompute",
    rows_MD: Tensor,
    w1_GFD: Tensor,
    w3_GFD: Tensor,
    w2_GDF: Tensor,
    counts_G: Tensor,
    counts_list: list[int] | None,
) -> Tensor:
    """Compute by `compute`, with the type that the plain ops give.

    While checking is on they run beside it, on tensors without values. So they are checked
    op by op, and the values are, bit for bit, those of unchecked code.
    """
    operands = rows_MD, w1_GFD, w3_GFD, w2_GDF, counts_G
    if type_of(rows_MD) is None:
        return compute(*operands, counts_list)
    # The autocast of a device does not reach meta tensors: they get its dtype here.
    stand_ins = [x.to("meta", autocast_dtype(x) or x.dtype) for x in operands]
    with torch.no_grad():
        types = type_of(plain_experts(*stand_ins)) or _NOWHERE

    def values(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, counts: Tensor) -> Tensor:
        with unchecked():
            return compute(x, w1, w3, w2, counts, counts_list)

    ins: list[Mapping[str, AxisType]] = [type_of(x) or _NOWHERE for x in operands]
    grads = [{axis: dual(t) for axis, t in known.items()} for known in ins]
    return region(values, ins=ins, outs=types, grads=grads)(*operands)


class Plain(AbstractExpertCompute):
    """Always by `plain_experts`."""

    def __call__(
        self,
        rows_MD: Tensor,
        w1_GFD: Tensor,
        w3_GFD: Tensor,
        w2_GDF: Tensor,
        counts_G: Tensor,
        counts_list: list[int] | None,
    ) -> Tensor:
        return plain_experts(rows_MD, w1_GFD, w3_GFD, w2_GDF, counts_G)


class ByExpert(AbstractExpertCompute):
    """Expert by expert where that can be done, else by `plain_experts`."""

    def __call__(
        self,
        rows_MD: Tensor,
        w1_GFD: Tensor,
        w3_GFD: Tensor,
        w2_GDF: Tensor,
        counts_G: Tensor,
        counts_list: list[int] | None,
    ) -> Tensor:
        operands = rows_MD, w1_GFD, w3_GFD, w2_GDF
        if not is_plain_cpu(*operands):
            return plain_experts(*operands, counts_G)
        counts = counts_on_host(rows_MD, w1_GFD, counts_G, counts_list)
        rows_MD, *weights = in_autocast_dtype(*operands)
        w1_GFD, w3_GFD, w2_GDF = weights
        operands = rows_MD, w1_GFD, w3_GFD, w2_GDF
        if is_half(rows_MD) and rows_MD.shape[0] < FEW_ROWS * w1_GFD.shape[0]:
            return plain_experts(*operands, counts_G)
        if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
            return _Experts.apply(*operands, counts)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType, reportReturnType]
        with torch.no_grad(), without_autocast(rows_MD):
            return loop(*operands, counts)


def is_half(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16)


def is_plain_cpu(*operands: Tensor) -> bool:
    """Return whether `operands` are in this memory, and not traced."""
    if torch.compiler.is_compiling() or in_transform():
        return False
    return all(
        x.device.type == "cpu" and x.layout == torch.strided and not is_dispatched(x)
        for x in operands
    )


def counts_on_host(
    rows_MD: Tensor, w1_GFD: Tensor, counts_G: Tensor, counts_list: list[int] | None
) -> list[int]:
    """Return the rows of each expert; refuses counts of other rows.

    Waits for the device unless the host knows them already.
    """
    check_integers("the counts", counts_G)
    counts = on_host(counts_G) if counts_list is None else counts_list
    check_groups(len(counts), w1_GFD.shape[0])
    check_counts(counts, rows_MD.shape[0])
    return counts


def loop(
    rows_MD: Tensor, w1_GFD: Tensor, w3_GFD: Tensor, w2_GDF: Tensor, counts: list[int]
) -> Tensor:
    """Compute without gradients, in the order of the experts."""
    out_MD = rows_MD.new_empty(rows_MD.shape[0], w2_GDF.shape[1])
    matrices = (w.mT.unbind(0) for w in (w1_GFD, w3_GFD, w2_GDF))
    for rows, out, w1, w3, w2 in zip(
        _split(rows_MD, counts), _split(out_MD, counts), *matrices, strict=True
    ):
        if rows.shape[0] > 0:
            hidden_mF = silu(product(rows, w1), inplace=True)
            product(hidden_mF.mul_(product(rows, w3)), w2, out)
    return out_MD


class _Experts(torch.autograd.Function):
    """`loop`, with the products w1 x and w3 x kept for backward."""

    @staticmethod
    def forward(
        ctx: Any, rows_MD: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, counts: list[int]
    ) -> Tensor:
        out_MD = rows_MD.new_empty(rows_MD.shape[0], w2.shape[1])
        matrices = (w.mT.unbind(0) for w in (w1, w3, w2))
        kept: list[Tensor] = []
        with without_autocast(rows_MD):
            for rows, out, w1_DF, w3_DF, w2_FD in zip(
                _split(rows_MD, counts), _split(out_MD, counts), *matrices, strict=True
            ):
                if rows.shape[0] > 0:
                    gate_mF, up_mF = product(rows, w1_DF), product(rows, w3_DF)
                    product(silu(gate_mF).mul_(up_mF), w2_FD, out)
                    kept += [gate_mF, up_mF]
        ctx.save_for_backward(rows_MD, w1, w3, w2, *kept)
        ctx.counts = counts
        return out_MD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_MD, w1, w3, w2, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable(ctx, (rows_MD, w1, w3, w2), grads[0])
        needs_rows, *needs_w, _ = ctx.needs_input_grad
        d_rows = torch.empty_like(rows_MD) if needs_rows else None
        # In the order of memory, as the optimizer will read them.
        d_w = [
            torch.empty(w.shape, dtype=w.dtype) if needed else None
            for w, needed in zip((w1, w3, w2), needs_w, strict=True)
        ]
        d_out_MD = grads[0].contiguous()  # of `.sum()` it comes expanded
        pairs = iter(zip(kept[::2], kept[1::2], strict=True))
        with without_autocast(rows_MD):
            for rows, d_out, d_of_rows, weights, d_weights in zip(
                _split(rows_MD, ctx.counts),
                _split(d_out_MD, ctx.counts),
                _parts(d_rows, ctx.counts),
                zip(w1.unbind(0), w3.unbind(0), w2.unbind(0), strict=True),
                zip(*(_parts(d, [1] * len(ctx.counts)) for d in d_w), strict=True),
                strict=True,
            ):
                if rows.shape[0] > 0:
                    _backward_of_one(
                        rows, d_out, next(pairs), weights, d_of_rows, d_weights
                    )
                    continue
                for gradient in d_weights:
                    if gradient is not None:
                        gradient.zero_()
        return d_rows, *d_w, None


def _split(x: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    return cast(Any, x).split(sizes)


def _parts(whole: Tensor | None, sizes: list[int]) -> Sequence[Tensor | None]:
    """Return the pieces of a gradient; None for each where none is wanted."""
    return [None] * len(sizes) if whole is None else _split(whole, sizes)


def _backward_of_one(
    rows: Tensor,
    d_out: Tensor,
    kept: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor],
    d_rows: Tensor | None,
    d_w: tuple[Tensor | None, ...],
) -> None:
    """Write the gradients of one expert's rows and weights."""
    (gate_mF, up_mF), (w1, w3, w2) = kept, weights
    d_w1, d_w3, d_w2 = (None if d is None else d.squeeze(0) for d in d_w)
    silu_mF = silu(gate_mF)
    if d_w2 is not None:
        outer(d_out, silu_mF * up_mF, d_w2)
    if d_rows is None and d_w1 is None and d_w3 is None:
        return
    d_hidden_mF = product(d_out, w2)
    d_up_mF = silu_mF.mul_(d_hidden_mF)
    d_gate_mF = torch.ops.aten.silu_backward(d_hidden_mF.mul_(up_mF), gate_mF)
    if d_w1 is not None:
        outer(d_gate_mF, rows, d_w1)
    if d_w3 is not None:
        outer(d_up_mF, rows, d_w3)
    if d_rows is not None:
        product(d_gate_mF, w1, d_rows)
        d_rows += product(d_up_mF, w3)


def _differentiable(
    ctx: Any, operands: tuple[Tensor, ...], grad_MD: Tensor
) -> tuple[Tensor | None, ...]:
    """Compute gradients that are differentiated again: those of the plain ops."""
    counts_G = torch.tensor(ctx.counts)
    rows_MD, w1, w3, w2 = operands
    out_MD = plain_experts(rows_MD, w1, w3, w2, counts_G)
    wanted = [
        x for x, needed in zip(operands, ctx.needs_input_grad, strict=False) if needed
    ]
    found = iter(torch.autograd.grad(out_MD, wanted, grad_MD, create_graph=True))
    return *(next(found) if n else None for n in ctx.needs_input_grad[:4]), None
