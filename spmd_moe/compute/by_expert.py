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

Where a call costs more than it computes, it takes several at a time, as `runs.py` says.

It is used where its result cannot be told from the plain one but by rounding: on a CPU,
outside of compiled code. A strategy is an object that a
`GroupedExperts` has as `compute`; another may be put there.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

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
from spmd_moe.compute.products import has_fast_batches, outer, product
from spmd_moe.compute.runs import Runs
from spmd_moe.permute import is_dispatched, on_host
from spmd_moe.precision import autocast_dtype, without_autocast

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
    return _of_groups(rows_MD, w1_GFD, w3_GFD, w2_GDF, ends_of(counts_G))


def _of_groups(
    rows_MD: Tensor, w1_GFD: Tensor, w3_GFD: Tensor, w2_GDF: Tensor, ends_G: Tensor
) -> Tensor:
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
    # The ends have values, as torch takes a millisecond to add numbers that have none. The
    # autocast of a device does not reach meta tensors: they get its dtype here.
    computed_with = *operands[:4], ends_of(counts_G)
    stand_ins = [x.to("meta", autocast_dtype(x) or x.dtype) for x in computed_with]
    with torch.no_grad():
        types = type_of(_of_groups(*stand_ins)) or _NOWHERE

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
        if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
            return _Experts.apply(*operands, counts)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType, reportReturnType]
        with torch.no_grad(), without_autocast(rows_MD):
            return loop(*operands, counts)


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
    plan = _plan(w1_GFD, counts)
    matrices = w1_GFD.mT, w3_GFD.mT, w2_GDF.mT
    return plan.unpadded(_computed(plan, plan.padded(rows_MD), matrices))


def _computed(plan: Runs, rows: Tensor, matrices: tuple[Tensor, ...]) -> Tensor:
    """Compute rows with padding."""
    out = plan.empty(rows, matrices[2].shape[2])
    each = (plan.matrices(w) for w in matrices)
    for run, batch, found, w1, w3, w2 in zip(
        plan.runs, plan.batches(rows), plan.batches(out), *each, strict=True
    ):
        if run.rows > 0:
            hidden = silu(product(batch, w1), inplace=True).mul_(product(batch, w3))
            product(hidden, w2, found)
    return out


class _Experts(torch.autograd.Function):
    """`loop`, with the products w1 x and w3 x kept for backward."""

    @staticmethod
    def forward(
        ctx: Any, rows_MD: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, counts: list[int]
    ) -> Tensor:
        plan = _plan(w1, counts)
        rows = plan.padded(rows_MD)
        out = plan.empty(rows, w2.shape[1])
        matrices = (plan.matrices(w.mT) for w in (w1, w3, w2))
        kept: list[Tensor] = []
        with without_autocast(rows_MD):
            for run, batch, found, w1_DF, w3_DF, w2_FD in zip(
                plan.runs, plan.batches(rows), plan.batches(out), *matrices, strict=True
            ):
                if run.rows > 0:
                    gate, up = product(batch, w1_DF), product(batch, w3_DF)
                    product(silu(gate).mul_(up), w2_FD, found)
                    kept += [gate, up]
        ctx.save_for_backward(rows_MD, w1, w3, w2, *kept)
        ctx.counts, ctx.plan = counts, plan
        return plan.unpadded(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_MD, w1, w3, w2, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable(ctx, (rows_MD, w1, w3, w2), grads[0])
        needs_rows, *needs_w, _ = ctx.needs_input_grad
        plan: Runs = ctx.plan
        d_rows = plan.empty(rows_MD) if needs_rows else None
        # In the order of memory, as the optimizer will read them.
        d_w = [
            torch.empty(w.shape, dtype=w.dtype) if needed else None
            for w, needed in zip((w1, w3, w2), needs_w, strict=True)
        ]
        d_out = plan.padded(grads[0].contiguous())  # of `.sum()` it comes expanded
        pairs = iter(zip(kept[::2], kept[1::2], strict=True))
        nothing = [None] * len(plan.runs)
        with without_autocast(rows_MD):
            for run, batch, d_found, d_batch, weights, d_of_w in zip(
                plan.runs,
                plan.batches(plan.padded(rows_MD)),
                plan.batches(d_out),
                nothing if d_rows is None else plan.batches(d_rows),
                zip(*(plan.matrices(w) for w in (w1, w3, w2)), strict=True),
                zip(
                    *(nothing if d is None else plan.matrices(d) for d in d_w), strict=True
                ),
                strict=True,
            ):
                if run.rows > 0:
                    _backward_of(batch, d_found, next(pairs), weights, d_batch, d_of_w)
                    continue
                for gradient in d_of_w:
                    if gradient is not None:
                        gradient.zero_()
        return None if d_rows is None else plan.unpadded(d_rows), *d_w, None


def _plan(w1_GFD: Tensor, counts: list[int]) -> Runs:
    """Say which experts are computed together: several only where a batch is fast."""
    _, hidden, dim = w1_GFD.shape
    return Runs(counts, hidden * dim if has_fast_batches(w1_GFD.dtype) else None)


def _backward_of(
    rows: Tensor,
    d_out: Tensor,
    kept: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor],
    d_rows: Tensor | None,
    d_w: Sequence[Tensor | None],
) -> None:
    """Write the gradients of the rows and weights of a run."""
    (gate, up), (w1, w3, w2), (d_w1, d_w3, d_w2) = kept, weights, d_w
    silu_of_gate = silu(gate)
    if d_w2 is not None:
        outer(d_out, silu_of_gate * up, d_w2)
    if d_rows is None and d_w1 is None and d_w3 is None:
        return
    d_hidden = product(d_out, w2)
    d_up = silu_of_gate.mul_(d_hidden)
    d_gate = torch.ops.aten.silu_backward(d_hidden.mul_(up), gate)
    if d_w1 is not None:
        outer(d_gate, rows, d_w1)
    if d_w3 is not None:
        outer(d_up, rows, d_w3)
    if d_rows is not None:
        product(d_gate, w1, d_rows)
        d_rows += product(d_up, w3)


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
