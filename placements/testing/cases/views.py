"""Calls of ops that move dims about, and of factories and random ops."""

# The lambdas below only hand tensors on.
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from placements.testing.cases.build import Builder, OpCall


def _flat_order(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the reference: a reshape keeps the elements and their order."""
    return x.reshape(tuple(shape))


def reshape(b: Builder) -> OpCall:
    """Return a call that merges dims, splits one, or both; a rank computes the sizes."""
    shape = b.shape(1)
    b.value(*shape)
    first = b.number(0, len(shape) - 1)
    last = b.number(first, len(shape) - 1)
    factor, inner_first = b.number(1, 3), b.pick(True, False)
    form = b.pick("merge", "split", "merge with -1", "both", "ones")
    fn, name = b.fn, b.name

    def sizes(x: Tensor) -> list[int]:
        held = list(x.shape)
        merged = 1
        for size in held[first : last + 1]:
            merged *= size
        rest = merged // factor
        parts = (factor, rest) if inner_first else (rest, factor)
        if form == "split":
            size = held[first]
            parts = (factor, size // factor) if inner_first else (size // factor, factor)
            return [*held[:first], *parts, *held[first + 1 :]]
        if form == "ones":
            return [*held[:first], 1, *held[first:]]
        if form == "both":
            return [*held[:first], *parts, *held[last + 1 :]]
        known = -1 if form == "merge with -1" and 0 not in held else merged
        return [*held[:first], known, *held[last + 1 :]]

    def run(x: Tensor) -> Any:
        wanted = sizes(x)
        if name.endswith("_as"):
            return fn(x, torch.zeros(wanted, dtype=x.dtype))
        return fn(x, wanted)

    call = b.call(run=run, reference=_flat_order)
    text = f"{b.name}(x0, {form}, dims {first}..{last}, {factor}, {inner_first})"
    return OpCall(call.name, call.operands, call.run, text, call.reference)


def flatten(b: Builder) -> OpCall:
    shape = b.shape()
    b.value(*shape)
    if b.name == "ravel" or not shape:
        return b.call()
    first = b.number(0, len(shape) - 1)
    return b.call(first, b.number(first, len(shape) - 1))


def unflatten(b: Builder) -> OpCall:
    shape = b.shape(1)
    b.value(*shape)
    factor = b.number(1, 3)
    sizes = b.pick((factor, -1), (-1, factor), (1, factor, -1))
    return b.call(b.dim(shape), sizes)


def permute(b: Builder) -> OpCall:
    shape = b.shape(1)
    b.value(*shape)
    order = list(range(len(shape)))
    k = b.number(0, len(shape) - 1)
    order = [*order[k:], *order[:k]]
    if b.pick(False, True):
        order.reverse()
    return b.call(order) if b.pick(True, False) else b.call(*order)


def two_dims(b: Builder) -> OpCall:
    if b.pick(False, False, False, True):  # torch lets one number have a last dim
        b.value()
        return b.call(-1, 0)
    shape = b.shape(1)
    b.value(*shape)
    return b.call(b.dim(shape), b.dim(shape))


def matrix(b: Builder) -> OpCall:
    number = b.pick(False, False, False, True)
    b.value(*(() if number else b.shape(2, 2 if b.name == "T" else 3)))
    return b.call()


def at_most_matrix(b: Builder) -> OpCall:
    b.value(*b.shape(0, 2))
    return b.call()


def movedim(b: Builder) -> OpCall:
    shape = b.shape(1)
    b.value(*shape)
    if len(shape) > 1 and b.pick(False, True):
        return b.call((0, 1), (1, 0))
    return b.call(b.dim(shape), b.dim(shape))


def squeeze(b: Builder) -> OpCall:
    shape = b.shape(1)
    b.value(*shape)
    return b.call(b.dim(shape)) if b.pick(True, False) else b.call()


def unsqueeze(b: Builder) -> OpCall:
    shape = b.shape()
    b.value(*shape)
    return b.call(b.number(-len(shape) - 1, len(shape)))


def expand(b: Builder) -> OpCall:
    shape = b.shape()
    b.value(*shape)
    lead = b.pick((), (2,))
    grows = [b.pick(False, True) for _ in shape]
    fn, name = b.fn, b.name

    def run(x: Tensor) -> Any:
        sizes = [3 if g and n == 1 else n for g, n in zip(grows, x.shape, strict=True)]
        if name == "expand_as":
            return fn(x, torch.zeros((*lead, *sizes), dtype=x.dtype))
        return fn(x, (*lead, *sizes))

    return b.call(run=run)


def repeat(b: Builder) -> OpCall:
    shape = b.shape()
    b.value(*shape)
    lead = b.pick((), (2,)) if shape else (2,)
    times = (*lead, *(b.pick(1, 1, 2) for _ in shape))
    if b.name == "tile" and b.pick(False, True):
        times = times[len(lead) :][-1:] or (2,)
    return b.call(times) if b.pick(True, False) else b.call(*times)


def repeat_interleave(b: Builder) -> OpCall:
    shape = b.shape(1)
    b.value(*shape)
    form = b.pick("dim", "flat", "tensor")
    if form == "tensor":
        dim = b.dim(shape)
        b.whole(shape[dim], letters="RSVI", below=3)
        return b.call(dim=dim)
    return b.call(2) if form == "flat" else b.call(2, b.dim(shape))


def narrow(b: Builder) -> OpCall:
    shape = b.shape(1)
    b.value(*shape)
    dim = b.dim(shape)
    start = b.number(0, shape[dim])
    return b.call(dim, start, b.number(0, shape[dim] - start))


def select(b: Builder) -> OpCall:
    shape = b.shape(1)
    b.value(*shape)
    return b.call(b.dim(shape), b.number(-1, 0))


def unbind(b: Builder) -> OpCall:
    shape = b.shape(1)
    b.value(*shape)
    return b.call(b.dim(shape))


def pieces(b: Builder) -> OpCall:
    shape = b.shape(1)
    b.value(*shape)
    dim = b.dim(shape)
    if b.name.endswith("split_with_sizes"):
        first = b.number(0, shape[dim])
        return b.call([first, shape[dim] - first], dim)
    return b.call(b.some(3), dim)


def joined(b: Builder) -> OpCall:
    shape = list(b.shape(1))
    dim = b.dim(shape)
    for _ in range(b.some(3)):
        shape[dim] = b.size()
        b.value(*shape)
    fn = b.fn
    return b.call(run=lambda *xs: fn(list(xs), dim))


def stacked(b: Builder) -> OpCall:
    shape = b.shape()
    for _ in range(b.number(1, 3)):
        b.value(*shape)
    dim = b.number(-len(shape) - 1, len(shape))
    fn = b.fn
    return b.call(run=lambda *xs: fn(xs, dim))


def triangle(b: Builder) -> OpCall:
    b.value(*b.shape(2))
    return b.call() if b.pick(True, False) else b.call(b.number(-1, 1))


def pad(b: Builder) -> OpCall:
    shape = b.shape(1)
    b.value(*shape)
    pads = [b.number(0, 2) for _ in range(2 * b.number(1, len(shape)))]
    return b.call(pads) if b.pick(True, False) else b.call(pads, value=b.pick(0.0, 1.0))


def filled_like(b: Builder) -> OpCall:
    b.value(*b.shape())
    return b.call(b.pick(0, 2)) if "full" in b.name else b.call()


def filled_new(b: Builder) -> OpCall:
    b.value(*b.shape())
    shape = b.shape()
    return b.call(shape, b.pick(0, 2)) if "full" in b.name else b.call(shape)


def filled(b: Builder) -> OpCall:
    shape = b.shape()
    return b.call(shape, b.pick(0, 2)) if "full" in b.name else b.call(shape)


def empty_like(b: Builder) -> OpCall:
    b.value(*b.shape())
    shape = () if b.name == "empty_like" else (b.shape(),)
    return b.call(*shape, drawn=True)


def empty(b: Builder) -> OpCall:
    shape = b.shape()
    strides = [(1,) * len(shape)] if b.name == "empty_strided" else []
    return b.call(shape, *strides, drawn=True)


def counted(b: Builder) -> OpCall:
    if b.name in ("linspace", "logspace"):
        return b.call(0, 1, b.size())
    if "indices" in b.name:
        return b.call(b.size(), b.size())
    if "freq" in b.name or "window" in b.name:
        return b.call(b.some(4))
    return b.call(b.size()) if b.pick(True, False) or b.name == "eye" else b.call(1, 5, 2)


def dropout(b: Builder) -> OpCall:
    b.value(*b.shape())
    if b.pick(True, False):
        return b.call(0.5, drawn=True)
    return b.call(p=b.pick(0.0, 0.5), training=False)


def sample(b: Builder) -> OpCall:
    if b.name == "multinomial":
        b.value(b.size() + 1, 3, positive=True)
        return b.call(2, drawn=True)
    b.value(*b.shape(), below=2)
    return b.call(drawn=True)


def drawn_like(b: Builder) -> OpCall:
    b.value(*b.shape())
    return b.call(*((0, 9) if "randint" in b.name else ()), drawn=True)


def drawn(b: Builder) -> OpCall:
    if b.name == "randperm":
        return b.call(b.size(), drawn=True)
    shape = b.shape()
    return (
        b.call(0, 9, shape, drawn=True)
        if b.name == "randint"
        else b.call(shape, drawn=True)
    )
