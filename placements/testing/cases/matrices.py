"""Calls of linear algebra, of complex numbers and of Fourier transforms."""

# The lambdas below only hand tensors on.
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from typing import Any

import torch
from torch import Tensor

from placements.testing.cases.build import Builder, OpCall


def _well(x: Tensor) -> Tensor:
    """Return matrices with an inverse and a root, whatever the elements are."""
    return x @ x.mT + 5 * torch.eye(x.shape[-1], dtype=x.dtype)


def _real(found: Any) -> Any:
    """Return what the laws compare: numbers that are real, without signs of their own."""
    if isinstance(found, tuple | list):
        return type(found)(_real(x) for x in found) if type(found) is list else tuple(
            _real(x) for x in found
        )  # fmt: skip
    return torch.view_as_real(found) if found.is_complex() else found


def each(b: Builder) -> OpCall:
    size = b.some(3)
    b.value(*b.pick((), (b.some(4),)), size, size)
    fn, name = b.fn, b.name
    args: tuple[Any, ...] = (2,) if "power" in name else ()

    def run(x: Tensor) -> Any:
        found = fn(_well(x), *args)
        if ("svd" in name and "vals" not in name) or name in ("qr", "linalg_qr"):
            return found[1].abs()  # signs of the others are torch's choice
        return found[0] if "eigh" in name else found

    return b.call(run=run)


def solved(b: Builder) -> OpCall:
    size, lead = b.some(3), b.pick((), (b.some(4),))
    b.value(*lead, size, size)
    b.value(*lead, size, b.some(3))
    fn = b.fn
    options: dict[str, Any] = {"upper": True} if "triangular" in b.name else {}
    return b.call(run=lambda x, y: fn(_well(x), y, **options))


def matrix_norm(b: Builder) -> OpCall:
    shape = b.shape(2)
    b.value(*shape)
    if len(shape) > 2 and b.pick(True, False):
        return b.call("fro", (0, 1))
    return b.call() if b.pick(True, False) else b.call(keepdim=True)


def multi_dot(b: Builder) -> OpCall:
    sizes = [b.some(4) for _ in range(4)]
    for k in range(3):
        b.value(sizes[k], sizes[k + 1])
    fn = b.fn
    whole = b.name == "linalg_multi_dot"
    return b.call(run=lambda *xs: fn(xs) if whole else fn(*xs))


def tensordot(b: Builder) -> OpCall:
    i, j, k, n = (b.size() for _ in range(4))
    b.value(i, j, k)
    if b.pick(True, False):
        b.value(j, k, n)
        return b.call(2)
    b.value(k, n, i)
    return b.call(([0, 2], [2, 0]))


def addr(b: Builder) -> OpCall:
    rows, columns = b.size(), b.size()
    shape = (rows, columns)
    b.value(*(shape if b.name.endswith("_") else b.under(shape)))
    b.value(rows)
    b.value(columns)
    return b.call()


def addbmm(b: Builder) -> OpCall:
    m, k, n, batch = b.some(4), b.some(4), b.some(4), b.some(3)
    b.value(m, n)
    b.value(batch, m, k)
    b.value(batch, k, n)
    return b.call()


def bilinear(b: Builder) -> OpCall:
    rows, i, j, o = b.some(4), b.some(3), b.some(3), b.some(3)
    b.value(rows, i)
    b.value(rows, j)
    b.value(o, i, j)
    if b.pick(True, False):
        b.value(o)
    return b.call()


def cross(b: Builder) -> OpCall:
    rows = b.some(4)
    b.value(rows, 3)
    b.value(rows, 3)
    return b.call() if b.name == "linalg_cross" else b.call(dim=-1)


def compared(b: Builder) -> OpCall:
    shape = b.shape(2)
    b.value(*shape)
    b.value(*shape)
    if b.name == "pairwise_distance":
        return b.call()
    return b.call(dim=b.dim(shape)) if b.pick(True, False) else b.call()


def distances(b: Builder) -> OpCall:
    lead, size = b.pick((), (2,)), b.some(3)
    b.value(*lead, b.some(4), size)
    b.value(*lead, b.some(4), size)
    return b.call()


def diagonal(b: Builder) -> OpCall:
    shape = b.shape(2)
    b.value(*shape)
    if b.name == "diag_embed" or b.pick(True, False):
        return b.call()
    if b.name == "linalg_diagonal":
        return b.call(offset=1)
    return b.call(0, -1, -2)


def complex_part(b: Builder) -> OpCall:
    b.value(*b.shape(), 2)
    fn = b.fn
    return b.call(run=lambda x: _real(torch.resolve_conj(fn(torch.view_as_complex(x)))))


def of_pairs(b: Builder) -> OpCall:
    b.value(*b.shape(), 2)
    fn = b.fn
    return b.call(run=lambda x: _real(fn(x)))


def to_pairs(b: Builder) -> OpCall:
    shape = b.shape()
    b.value(*shape)
    b.value(*shape)
    fn = b.fn
    return b.call(run=lambda x, y: fn(torch.complex(x, y)))


def two_parts(b: Builder) -> OpCall:
    shape = b.shape()
    b.value(*shape)
    b.value(*shape)
    fn = b.fn
    return b.call(run=lambda x, y: _real(fn(x, y)))


def to_complex(b: Builder) -> OpCall:
    b.value(*b.shape())
    fn = b.fn
    return b.call(run=lambda x: fn(x).real.double())


def spectrum(b: Builder) -> OpCall:
    many = b.name[-1] in "2n" or "shift" in b.name
    shape = [b.number(2, 4) for _ in range(b.number(2 if many else 1, 3))]
    b.value(*shape)
    fn = b.fn
    options: dict[str, Any] = {}
    if b.pick(True, False):
        dim = b.dim(shape)
        options = {"dim": (dim, (dim + 1) % len(shape)) if many else dim}
    return b.call(run=lambda x: _real(fn(x, **options)))
