"""Calls of matrix products, norms and losses."""

# The lambdas below only hand tensors on.
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from typing import Any

import torch
from torch import Tensor

from placements.testing.cases.build import Builder, OpCall

# equations, and the sizes of the operands by letter
_EQUATIONS = (
    "ij,jk->ik", "ij,kj->ki", "bij,bjk->bik", "ij,ij->", "ij->ji", "ij->i", "i,j->ij",
    "bij,kj->bik", "...j,jk->...k", "ij,jk", "ij,ik,il->jkl", "ii->i", "ij->",
)  # fmt: skip


def matmul(b: Builder) -> OpCall:
    m, k, n, batch = b.size(), b.size(), b.size(), b.pick(1, 2, 3)
    left: tuple[int, ...]
    right: tuple[int, ...]
    left, right = {
        "mm": ((m, k), (k, n)),
        "bmm": ((batch, m, k), (batch, k, n)),
        "mv": ((m, k), (k,)),
        "dot": ((k,), (k,)),
        "vdot": ((k,), (k,)),
        "inner": b.pick(((m, k), (n, k)), ((k,), (k,)), ((m, k), (k,))),
    }.get(
        b.name,
        b.pick(
            ((m, k), (k, n)), ((batch, m, k), (k, n)), ((batch, m, k), (batch, k, n)),
            ((k,), (k, n)), ((m, k), (k,)), ((k,), (k,)), ((1, m, k), (batch, k, n)),
            ((m, k), (batch, k, n)), ((k,), (batch, k, n)), ((batch, m, k), (k,)),
            ((2, 1, m, k), (batch, k, n)),
        ),
    )  # fmt: skip
    if b.name == "__rmatmul__":
        left, right = right, left
    b.value(*left)
    b.value(*right)
    return b.call()


def linear(b: Builder) -> OpCall:
    k, n = b.size(), b.size()
    b.value(*b.shape(0, 2), k)
    vector = b.pick(False, False, False, True)
    b.value(*(() if vector else (n,)), k)
    if b.pick(True, False) and not vector:
        b.value(n)
    return b.call()


def add_product(b: Builder) -> OpCall:
    m, k, n = b.size(), b.size(), b.size()
    batch = (b.pick(1, 2, 3),) if b.name.startswith("baddbmm") else ()
    right = () if b.name.startswith("addmv") else (n,)
    whole = (*batch, m, *right)
    # torch's addmv does not broadcast what is added where it multiplies no elements.
    as_large = b.name.endswith("_") or b.name.startswith("addmv")
    factors: dict[str, Any] = {}
    if b.pick(False, True):
        factors = {"beta": b.pick(0, 2), "alpha": 2}
    # With beta=0 it is not read, so the result need not be Varying because it is.
    letters = "RSPI" if factors.get("beta") == 0 else "RSPVI"
    b.value(*(whole if as_large else b.under(whole)), letters=letters)
    b.value(*batch, m, k)
    b.value(*batch, k, *right)
    return b.call(**factors)


def outer(b: Builder) -> OpCall:
    b.value(b.size())
    b.value(b.size())
    return b.call()


def einsum(b: Builder) -> OpCall:
    equation = b.pick(*_EQUATIONS)
    sizes = {letter: b.size() for letter in "bijkl"}
    for term in equation.partition("->")[0].split(","):
        lead = b.shape(0, 2) if "..." in term else ()
        b.value(*lead, *(sizes[c] for c in term.replace("...", "")))
    fn = b.fn
    call = b.call(run=lambda *xs: fn(equation, *xs))
    return OpCall(call.name, call.operands, call.run, f"einsum({equation!r}, ...)")


def grouped(b: Builder) -> OpCall:
    """Return a grouped product; the kernel takes sizes that are multiples of 16 bytes."""
    rows, groups = b.pick(4, 2, 5), b.some(3)
    b.value(rows, 4, dtype=torch.float32)
    b.value(groups, 4, 4, dtype=torch.float32)
    b.value(groups, dtype=torch.int32, letters="RVI", ends=rows)
    fn = b.fn
    return b.call(run=lambda x, w, ends: fn(x, w, offs=ends))


def attention(b: Builder) -> OpCall:
    lead = b.pick((2,), (2, 2), (1,), ())
    rows, keys, d, e = b.some(4), b.some(4), b.some(3), b.some(3)
    b.value(*lead, rows, d)
    b.value(*lead, keys, d)
    b.value(*lead, keys, e)
    form = b.pick("plain", "mask", "causal")
    if form == "mask":
        b.value(*b.pick((rows, keys), (*lead, rows, keys), (1, keys)))
        return b.call()
    return b.call(is_causal=form == "causal")


def normalised(b: Builder) -> OpCall:
    shape = b.shape(1)
    last = shape[-1:] if b.pick(True, False) else shape[-2:]
    b.value(*shape)
    extras = b.number(0, 2 if b.name == "layer_norm" else 1)
    for _ in range(extras):
        b.value(*last)
    fn = b.fn
    return b.call(run=lambda x, *rest: fn(x, last, *rest, eps=0.1))


def cross_entropy(b: Builder) -> OpCall:
    classes = b.some(4)
    lead = (b.size(),) if b.pick(True, True, False) else ()
    rest = b.pick((), (), (2,)) if lead else ()
    b.value(*lead, classes, *rest)
    if b.name == "cross_entropy" and b.pick(False, True):
        b.value(*lead, classes, *rest, positive=True)
    else:
        b.whole(*lead, *rest, below=classes, letters="RSVI")
    weighted = b.pick(False, True)
    if weighted:
        b.value(classes, positive=True, fixed=True)
    reduction = b.pick("sum", "none", "mean")
    fn = b.fn
    return b.call(run=lambda *xs: fn(*xs, reduction=reduction))


def elementwise_loss(b: Builder) -> OpCall:
    shape = b.shape()
    b.value(*shape)
    b.value(*shape)
    fn, name = b.fn, b.name
    options: dict[str, Any] = {"reduction": b.pick("sum", "none", "mean")}
    if name.startswith("binary") and b.pick(False, True):
        b.value(*shape, fixed=True)

    def run(x: Tensor, y: Tensor, weight: Tensor | None = None) -> Any:
        if name == "binary_cross_entropy":
            x, y = x.sigmoid(), y.sigmoid()
        extra = {} if weight is None else {"weight": weight}
        return fn(x, y, **extra, **options)

    return b.call(run=run)
