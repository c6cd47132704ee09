"""Calls of ops that put tensors side by side, or look for elements."""

# The lambdas below only hand tensors on.
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import math

from placements.testing.cases.build import Builder, OpCall


def stacked(b: Builder) -> OpCall:
    shape = b.shape(1)
    for _ in range(b.some(3)):
        b.value(*shape)
    fn = b.fn
    return b.call(run=lambda *xs: fn(xs))


def kron(b: Builder) -> OpCall:
    b.value(*b.shape())
    b.value(*b.shape())
    return b.call()


def taken(b: Builder) -> OpCall:
    shape = [b.some(3) for _ in range(b.number(1, 2))]
    b.value(*shape)
    b.whole(*b.shape(), below=math.prod(shape), letters="RSVI")
    return b.call()


def filled_diagonal(b: Builder) -> OpCall:
    b.value(*(b.some(3),) * b.number(2, 3))
    return b.call(b.pick(0.0, 2.0))


def grid(b: Builder) -> OpCall:
    for _ in range(b.number(1, 3)):
        b.value(b.some(4))
    fn, way = b.fn, b.pick("ij", "xy")
    return b.call(run=lambda *xs: tuple(fn(*xs, indexing=way)))


def broadcast(b: Builder) -> OpCall:
    shape = b.shape(1)
    b.value(*shape)
    b.value(*b.under(shape))
    fn = b.fn
    return b.call(run=lambda *xs: tuple(fn(*xs)))


def at_least(b: Builder) -> OpCall:
    b.value(*b.shape())
    return b.call()


def parts(b: Builder) -> OpCall:
    shape = list(b.shape(3, 3))
    b.value(*shape)
    fn = b.fn
    return b.call(run=lambda x: tuple(fn(x, [1])))


def difference(b: Builder) -> OpCall:
    shape = [b.number(2, 4) for _ in range(b.number(1, 3))]
    b.value(*shape)
    dim = b.dim(shape)
    if b.pick(True, False):
        return b.call(dim=dim)
    b.value(*shape)
    fn = b.fn
    return b.call(run=lambda x, y: fn(x, 1, dim, y))


def glu(b: Builder) -> OpCall:
    shape = [2 * b.some(2) for _ in range(b.number(1, 3))]
    b.value(*shape)
    return b.call() if b.pick(True, False) else b.call(b.dim(shape))


def turned(b: Builder) -> OpCall:
    b.value(*b.shape(2))
    return b.call()


def unique(b: Builder) -> OpCall:
    b.whole(*b.shape(1, 1), below=3, letters="RSVI")
    return b.call()


def bucketed(b: Builder) -> OpCall:
    fn, name = b.fn, b.name
    b.whole(*b.shape(1))
    b.whole(b.some(4), letters="RVI", ends=4)  # of sorted pieces the counts add up
    flipped = name != "bucketize"
    return b.call(run=lambda x, bounds: fn(bounds, x) if flipped else fn(x, bounds))


def is_among(b: Builder) -> OpCall:
    b.whole(*b.shape(), below=4, letters="RSVI")
    if b.pick(False, False, True):
        return b.call(2)
    b.whole(*b.shape(1, 1), below=4, letters="RSVI")
    return b.call()


def masked_scatter(b: Builder) -> OpCall:
    shape = b.shape()
    b.value(*shape)
    b.mask(*b.under(shape))
    b.value(*shape)
    return b.call()


def scattered_rows(b: Builder) -> OpCall:
    shape = [b.number(2, 4) for _ in range(b.number(1, 3))]
    dim = b.number(0, len(shape) - 1)
    b.value(*shape)
    if b.name == "select_scatter":
        b.value(*(n for d, n in enumerate(shape) if d != dim))
        return b.call(dim, 1)
    b.value(*(1 if d == dim else n for d, n in enumerate(shape)))
    return b.call(dim, 1, 2)
