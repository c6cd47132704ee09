"""Calls of ops that work element by element, along one dim, or reduce dims."""

# The lambdas below only hand tensors on.
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from typing import Any

import torch
from torch import Tensor

from placements.testing.cases.build import Builder, OpCall


def unary(b: Builder) -> OpCall:
    b.value(*b.shape())
    return b.call()


def unary_whole(b: Builder) -> OpCall:
    b.value(*b.shape(), dtype=b.pick(torch.int64, torch.bool), letters="RSVI")
    return b.call()


def binary(b: Builder) -> OpCall:
    shape = b.shape()
    b.value(*shape)
    if b.number(0, 3) == 3:
        return b.call(b.pick(2, 0, -1))
    b.value(*b.under(shape))
    return b.call()


def binary_tensors(b: Builder) -> OpCall:
    shape = b.shape()
    b.value(*shape)
    b.value(*b.under(shape))
    return b.call()


def binary_whole(b: Builder) -> OpCall:
    shape = b.shape()
    dtype = torch.int64 if "shift" in b.name else b.pick(torch.int64, torch.bool)
    below = 3 if "shift" in b.name else None
    b.value(*shape, dtype=dtype, letters="RSVI", below=below)
    b.value(*b.under(shape), dtype=dtype, letters="RSVI", below=below)
    return b.call()


def shifted_by_tensor(b: Builder) -> OpCall:
    shape = b.shape()
    b.whole(*shape, letters="RSVI", below=3)
    return b.call(b.pick(1, 2))


def with_number(b: Builder) -> OpCall:
    b.value(*b.shape())
    return b.call(b.pick(2, 3, 0))


def mvlgamma(b: Builder) -> OpCall:
    b.value(*b.shape(), positive=True)
    fn = b.fn
    return b.call(run=lambda x: fn(x + 2, 2))


def polygamma(b: Builder) -> OpCall:
    b.value(*b.shape(), positive=True)
    fn, method = b.fn, not b.name.startswith("special")
    return b.call(run=lambda x: fn(x, 1) if method else fn(1, x))


def clamp(b: Builder) -> OpCall:
    shape = b.shape()
    b.value(*shape)
    if b.pick(True, False):
        return b.call(-1, 1)
    b.value(*shape)
    b.value(*b.under(shape))
    return b.call()


def threshold(b: Builder) -> OpCall:
    b.value(*b.shape())
    return b.call(0.5, 2.0)


def ternary(b: Builder) -> OpCall:
    shape = b.shape()
    b.value(*shape)
    b.value(*b.under(shape))
    b.value(*b.under(shape))
    return b.call()


def lerp(b: Builder) -> OpCall:
    shape = b.shape()
    b.value(*shape)
    b.value(*b.under(shape))
    if b.pick(True, False):
        return b.call(0.5)
    b.value(*b.under(shape))
    return b.call()


def quotient(b: Builder) -> OpCall:
    shape = b.shape()
    b.value(*shape)
    rounding = b.pick(None, None, "floor")
    options: dict[str, Any] = (
        {"rounding_mode": rounding} if rounding and "true" not in b.name else {}
    )
    if b.pick(True, False):
        return b.call(b.pick(2, 4), **options)
    b.value(*b.under(shape), positive=True)
    return b.call(**options)


def where(b: Builder) -> OpCall:
    shape = b.shape()
    form = b.pick("tensor", "number", "condition alone")
    b.mask(*(shape if form == "condition alone" else b.under(shape)))
    if form == "condition alone":
        return b.call()
    b.value(*shape)
    if form == "tensor":
        b.value(*b.under(shape))
        return b.call()
    return b.call(b.pick(0.0, 1.0))


def masked_fill(b: Builder) -> OpCall:
    shape = b.shape()
    b.value(*shape)
    b.mask(*b.under(shape))
    if b.pick(True, True, False):
        return b.call(b.pick(0.0, 1.0))
    b.value()
    return b.call()


def cast(b: Builder) -> OpCall:
    dtype = b.pick(torch.float64, torch.int64, torch.bool)
    b.value(*b.shape(), dtype=dtype, letters="RSPVI" if dtype != torch.bool else "RSVI")
    if b.name == "to":
        return b.call(b.pick(torch.float64, torch.int64, torch.float32, torch.bool))
    if b.name == "type":
        return b.call(b.pick(torch.float64, torch.int64))
    if b.name == "type_as":
        other = torch.zeros((), dtype=b.pick(torch.float64, torch.int64))
        fn = b.fn

        def run(x: Tensor) -> Tensor:
            return fn(x, torch.zeros_like(x, dtype=other.dtype))

        return b.call(run=run)
    return b.call()


def copy(b: Builder) -> OpCall:
    shape = b.shape()
    b.value(*shape)
    b.value(*b.under(shape))
    return b.call()


def fill(b: Builder) -> OpCall:
    b.value(*b.shape())
    if "zero" in b.name:
        return b.call()
    if b.pick(True, True, False):
        return b.call(b.pick(0, 1))
    b.value()
    return b.call()


def reduction(b: Builder) -> OpCall:
    shape = b.shape(1)
    whole = torch.float64 if b.name.startswith("nan") else torch.int64  # no NaN there
    b.value(*shape, dtype=b.pick(torch.float64, torch.float64, whole))
    one_dim = ("prod", "all", "any")
    form = b.pick("dim", "all dims", "keyword", "dims", "keepdim")
    if b.name == "count_nonzero":
        form = b.pick("dim", "all dims")
    if b.name == "logsumexp" and form == "all dims":
        form = "dim"
    if b.name in one_dim and form == "dims":
        form = "dim"
    dim = b.dim(shape)
    if form == "all dims":
        return b.call()
    if form == "dim":
        return b.call(dim)
    if form == "keyword":
        return b.call(dim=dim)
    if form == "dims":
        dims = tuple(sorted({dim % len(shape), b.dim(shape) % len(shape)}))
        return b.call(dims)
    return b.call(dim, keepdim=True)


def norm(b: Builder) -> OpCall:
    shape = b.shape(1)
    b.value(*shape)
    form = b.pick("plain", "dim", "keyword")
    if form == "plain":
        return b.call(2)
    if form == "dim":
        return b.call(2, b.dim(shape))
    return b.call(2, dim=b.dim(shape), keepdim=True)


def choice(b: Builder) -> OpCall:
    shape = b.shape(1)
    b.value(*shape)
    form = b.pick("dim", "all", "other", "keyword")
    if b.name in ("median", "nanmedian", "mode") and form == "other":
        form = "all"
    if b.name.startswith("cum") and form in ("all", "other"):
        form = "dim"
    if form == "all":
        return b.call()
    if form == "other":
        b.value(*b.under(shape))
        return b.call()
    if form == "keyword":
        return b.call(dim=b.dim(shape))
    return b.call(b.dim(shape), *b.pick((), (True,)) if "cum" not in b.name else ())


def position(b: Builder) -> OpCall:
    shape = b.shape(1)
    b.value(*shape)
    form = b.pick("dim", "all", "keepdim")
    if form == "all":
        return b.call()
    return b.call(b.dim(shape), keepdim=form == "keepdim")


def along(b: Builder) -> OpCall:
    shape = b.shape(1)
    b.value(*shape)
    dim = b.dim(shape)
    return b.call(dim) if b.pick(True, False) else b.call(dim=dim)


def normalize(b: Builder) -> OpCall:
    shape = b.shape(2)
    b.value(*shape)
    form = b.pick("keyword", "positional", "default")
    if form == "keyword":
        return b.call(dim=b.dim(shape))
    return b.call(2.0, b.dim(shape)) if form == "positional" else b.call()


def flip(b: Builder) -> OpCall:
    shape = b.shape(1)
    b.value(*shape)
    dims = sorted({b.dim(shape) % len(shape), b.dim(shape) % len(shape)})
    form = b.pick("tuple", "arguments", "keyword")
    if form == "keyword":
        return b.call(dims=dims)
    return b.call(*dims) if form == "arguments" else b.call(dims)


def roll(b: Builder) -> OpCall:
    shape = b.shape(1)
    b.value(*shape)
    form = b.pick("dim", "keyword", "flat")
    if form == "flat":
        return b.call(1)
    if form == "keyword":
        return b.call(shifts=1, dims=b.dim(shape))
    return b.call(b.number(1, 2), b.dim(shape))


def ordering(b: Builder) -> OpCall:
    shape = b.shape(1)
    ids = b.name == "sort" and b.pick(False, True)
    b.value(*shape, dtype=torch.int64 if ids else torch.float64)
    if b.name == "msort":
        return b.call()
    if b.name in ("topk", "kthvalue"):
        return b.call(1, b.dim(shape)) if b.pick(True, False) else b.call(1)
    form = b.pick("dim", "default", "keyword")
    if form == "default":
        return b.call()
    options: dict[str, Any] = {"stable": True} if b.pick(False, True) else {}
    if form == "keyword" or options:
        return b.call(dim=b.dim(shape), **options)
    return b.call(b.dim(shape))


def bincount(b: Builder) -> OpCall:
    size = b.size()
    b.whole(size, letters="RSVI", below=3, counts=3)
    if b.pick(True, False):
        b.value(size, fixed=True)
    fn, weighted = b.fn, len(b.operands) > 1

    def run(x: Tensor, weights: Tensor | None = None) -> Tensor:
        counts = fn(x, weights, minlength=3)
        # Of no elements torch counts in integers, whatever the weights are.
        return counts if weights is None else counts.to(weights.dtype)

    return b.call(run=run) if weighted or b.pick(True, False) else b.call()


def histc(b: Builder) -> OpCall:
    b.value(*b.shape(1))
    return b.call(3, -3, 4) if b.pick(True, False) else b.call(bins=3, min=-3, max=4)


def one_hot(b: Builder) -> OpCall:
    classes = b.pick(9, 10, -1)
    # Of few ids: all pieces of many have the largest, and then the width is right.
    b.whole(*(b.shape(0, 1) if classes < 0 else b.shape()), below=9)
    return b.call(classes)
