"""Calls of gathers and scatters; an index holds rows of the dim that it addresses."""

# The lambdas below only hand tensors on.
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from typing import Any

from torch import Tensor

from placements.testing.cases.build import Builder, OpCall


def _smaller(b: Builder, shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """Return an index's shape: as the target, but for fewer rows in some dims."""
    rows = [
        n if d != dim and b.number(0, 3) < 3 else b.rows(n) for d, n in enumerate(shape)
    ]
    return tuple(rows)


def gather(b: Builder) -> OpCall:
    shape = b.shape(1)
    dim = b.dim(shape)
    x = b.value(*shape)
    at = dim % len(shape)
    taken = list(_smaller(b, shape, at))
    taken[at] = b.size()
    b.index(x, dim, *taken)
    fn = b.fn
    return b.call(run=lambda x, i: fn(x, dim, i))


def take_along_dim(b: Builder) -> OpCall:
    shape = b.shape(1)
    dim = b.dim(shape)
    x = b.value(*shape)
    taken = list(b.under(shape)) if b.pick(False, True) else list(shape)
    taken = [*(1,) * (len(shape) - len(taken)), *taken]
    taken[dim] = b.size()
    b.index(x, dim, *taken)
    fn = b.fn
    return b.call(run=lambda x, i: fn(x, i, dim))


def index_select(b: Builder) -> OpCall:
    shape = b.shape(1)
    dim = b.dim(shape)
    x = b.value(*shape)
    b.index(x, dim, b.size())
    fn = b.fn
    return b.call(run=lambda x, i: fn(x, dim, i))


def embedding(b: Builder) -> OpCall:
    weight = b.value(b.size(), b.size())
    b.index(weight, 0, *b.shape(0, 2))
    fn = b.fn
    padding = b.pick(None, None, None, 0)
    options = {} if padding is None else {"padding_idx": padding}
    return b.call(run=lambda w, i: fn(i, w, **options))


def scatter(b: Builder) -> OpCall:
    shape = b.shape(1)
    dim = b.dim(shape)
    x = b.value(*shape)
    taken = _smaller(b, shape, dim % len(shape))
    adds = b.name.startswith("scatter_add")
    b.index(x, dim, *taken, along=dim % len(shape), unique=not adds)
    fn = b.fn
    reduces = (b.pick("sum", "amax"),) if b.name.startswith("scatter_reduce") else ()
    if not adds and not reduces and b.pick(False, True):
        number = b.pick(0.0, 1.0)
        return b.call(run=lambda x, i: fn(x, dim, i, number))
    # torch has no gradient for a source that is larger than the index
    larger = b.pick(False, True) and min(b.sizes) < 2
    more = tuple(n + b.number(0, 1) for n in taken) if larger else taken
    b.value(*more)
    call = b.call(run=lambda x, i, s: fn(x, dim, i, s, *reduces))
    return OpCall(call.name, call.operands, call.run, f"{call.text}{[dim, *reduces]}")


def index_write(b: Builder) -> OpCall:
    shape = b.shape(1)
    dim = b.dim(shape)
    x = b.value(*shape)
    count = b.rows(shape[dim])
    b.index(x, dim, count, unique=not b.name.startswith("index_add"))
    fn = b.fn
    if b.name.startswith("index_fill"):
        if b.pick(True, False):
            number = b.pick(0.0, 1.0)
            return b.call(run=lambda x, i: fn(x, dim, i, number))
        b.value()
        return b.call(run=lambda x, i, v: fn(x, dim, i, v))
    rows = list(shape)
    rows[dim] = count
    b.value(*rows)
    return b.call(run=lambda x, i, s: fn(x, dim, i, s))


def _key(
    b: Builder, x: int, shape: tuple[int, ...], unique: bool
) -> tuple[list[Any], list[int]]:
    """Return a key as a list in which numbers of operands stand for tensors."""
    key: list[Any] = []
    tensors: list[int] = []
    forms = ["all", "index", "mask", "int", "part", "more all"]
    count = b.number(1, len(shape))
    common = b.number(0, 3)
    for d in range(count):
        form = b.pick(*forms)
        if tensors and form == "mask":
            form = "all"
        if form == "index":
            index_shape = (min(common, shape[d]) if unique else common,)
            if unique and tensors:
                key.append(slice(None))
                continue
            if not unique and b.pick(False, True):
                index_shape = (*index_shape, 2)
            tensors.append(b.index(x, d, *index_shape, unique=unique))
            key.append(("tensor", tensors[-1]))
        elif form == "mask":
            tensors.append(b.mask(shape[d]))
            key.append(("tensor", tensors[-1]))
            forms = ["all", "part"]
        elif form == "int":
            key.append(b.pick(0, -1))
        elif form == "part":
            step = 2 if min(b.sizes) < 2 else 5  # every second row of pieces of two fits
            key.append(b.pick(slice(1, None), slice(0, 2), slice(None, None, step)))
        else:
            key.append(slice(None))
    if b.pick(False, False, True):
        key.insert(b.number(0, len(key)), None)
    if count < len(shape) and b.pick(False, True):
        key.append(Ellipsis)
    return key, tensors


def _filled(key: list[Any], tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    return tuple(tensors[k[1]] if isinstance(k, tuple) else k for k in key)


def getitem(b: Builder) -> OpCall:
    shape = b.shape(1)
    x = b.value(*shape)
    key, _ = _key(b, x, shape, unique=False)
    fn = b.fn

    def run(*tensors: Tensor) -> Any:
        full = _filled(key, tensors)
        return fn(tensors[0], full if len(full) != 1 else full[0])

    call = b.call(run=run)
    return OpCall(call.name, call.operands, run, f"x0[{key}]")


def setitem(b: Builder) -> OpCall:
    shape = b.shape(1)
    x = b.value(*shape)
    key, _ = _key(b, x, shape, unique=True)
    fn = b.fn
    if b.pick(False, True):
        number = b.pick(0.0, 1.0)
        run = lambda *ts: fn(ts[0], _filled(key, ts), number)  # noqa: E731
        said: object = number
    else:
        has_mask = any(
            b.operands[k[1]].dtype.is_floating_point is False
            and b.operands[k[1]].rows_of is None
            for k in key
            if isinstance(k, tuple)
        )
        value = b.value(*_value_shape(b, shape, key, has_mask))
        run = lambda *ts: fn(ts[0], _filled(key, ts), ts[value])  # noqa: E731
        said = f"x{value}"
    call = b.call(run=run)
    return OpCall(call.name, call.operands, run, f"x0[{key}] = {said}")


def _value_shape(
    b: Builder, shape: tuple[int, ...], key: list[Any], has_mask: bool
) -> tuple[int, ...]:
    import torch

    tensors = tuple(torch.zeros(g.shape, dtype=g.dtype) for g in b.operands)
    try:
        full = torch.zeros(shape)[_filled(key, tensors)].shape
    except IndexError:
        return ()
    if has_mask:
        return b.pick((), (1,))
    return b.under(tuple(full))


def index_put(b: Builder) -> OpCall:
    shape = b.shape(1)
    x = b.value(*shape)
    count = b.rows(shape[0])
    # Summed sources may be spread over ranks: there index_add says more than index_put.
    unique = b.pick(True, False) or min(b.sizes) > 1
    b.index(x, 0, count, unique=unique)
    b.value(*b.pick((count, *shape[1:]), ()))
    fn = b.fn
    return b.call(run=lambda x, i, v: fn(x, (i,), v, not unique))


def masked_select(b: Builder) -> OpCall:
    shape = b.shape()
    b.value(*shape)
    b.mask(*b.under(shape))
    return b.call()


def nonzero(b: Builder) -> OpCall:
    b.value(*b.shape())
    return b.call()
