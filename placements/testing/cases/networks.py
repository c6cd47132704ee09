"""Calls of layers of networks: convolutions, pools, norms, losses.

Windows overlap here. Where they do not, a cut that lies between two of them would be right,
and whether it does is not looked at; the law of call forms draws such windows.
"""

# The lambdas below only hand tensors on.
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from typing import Any

from placements.testing.cases.build import Builder, OpCall


def _spatial(b: Builder) -> int:
    """How many dims a window has: 2 in `conv2d`."""
    return int(next(c for c in b.name if c.isdecimal()))


def _batch(b: Builder) -> tuple[int, ...]:
    return () if b.pick(False, False, True) else (b.some(4),)


def convolution(b: Builder) -> OpCall:
    dims, transposed = _spatial(b), "transpose" in b.name
    groups = b.pick(1, 1, 2)
    ins, outs = groups * b.some(3), groups * b.some(3)
    places, kernel = [b.number(3, 4) for _ in range(dims)], [2] * dims
    b.value(*_batch(b), ins, *places)
    pair = (ins, outs // groups) if transposed else (outs, ins // groups)
    b.value(*pair, *kernel)
    if b.pick(True, False):
        b.value(outs)
    return b.call(groups=groups)


def pool(b: Builder) -> OpCall:
    dims = _spatial(b)
    b.value(*_batch(b), b.some(3), *(b.number(3, 4) for _ in range(dims)))
    if b.name.startswith("adaptive"):
        return b.call(b.pick(1, 2))
    return b.call(2, stride=1)


def interpolate(b: Builder) -> OpCall:
    b.value(b.some(4), b.some(3), b.number(2, 3), b.number(2, 3))
    if b.pick(True, False):
        return b.call(scale_factor=2, mode="bilinear")
    return b.call(size=(3, 3), mode=b.pick("bilinear", "nearest"))


def grid_sample(b: Builder) -> OpCall:
    batch = b.some(4)
    b.value(batch, b.some(3), 3, 3)
    b.value(batch, b.number(2, 4), 2, 2)
    fn = b.fn
    # Away from the middle between elements, where the gradient jumps.
    return b.call(run=lambda x, grid: fn(x, grid.tanh() * 0.7, align_corners=True))


def shuffle(b: Builder) -> OpCall:
    lead = b.pick((), (b.some(3),))
    if b.name == "pixel_unshuffle":
        b.value(*lead, b.some(3), b.pick(2, 6), 2)
    else:
        b.value(*lead, 4, b.number(2, 3), 2)
    return b.call(2)


def unfold(b: Builder) -> OpCall:
    shape = [b.number(2, 4) for _ in range(b.number(1, 3))]
    b.value(*shape)
    return b.call(b.dim(shape), 2, 1)


def fold(b: Builder) -> OpCall:
    b.value(*_batch(b), 4, 4)
    return b.call((3, 3), 2)


def _extras(b: Builder, channels: int, running: bool) -> tuple[bool, bool]:
    """Add running statistics, and a weight and a bias; say which of them."""
    affine = b.pick(True, False)
    for _ in range(2 * running):
        b.value(channels, positive=True, fixed=True)
    for _ in range(2 * affine):
        b.value(channels)
    return running, affine


def batch_norm(b: Builder) -> OpCall:
    training, channels = b.pick(True, False), b.some(3)
    b.value(b.number(2, 4), channels, *b.pick((), (b.number(2, 3),)))
    # Running statistics are written, which the law of writes tests.
    running, affine = _extras(b, channels, running=not training)
    return b.call(run=_in_order(b, running, affine, training))


def instance_norm(b: Builder) -> OpCall:
    training, channels = b.pick(True, False), b.some(3)
    b.value(b.some(4), channels, b.number(2, 3))
    running, affine = _extras(b, channels, running=not training)
    return b.call(run=_in_order(b, running, affine, training))


def _in_order(b: Builder, running: bool, affine: bool, flag: bool) -> Any:
    fn = b.fn

    def run(x: Any, *rest: Any) -> Any:
        given = list(rest)
        stats = [given.pop(0) for _ in range(2)] if running else [None, None]
        extras = given if affine else [None, None]
        return fn(x, *stats, *extras, flag, 0.1, 0.1)

    return run


def group_norm(b: Builder) -> OpCall:
    groups = b.pick(1, 2)
    channels = groups * b.some(2)
    b.value(b.some(4), channels, b.number(2, 3))
    if b.pick(True, False):
        b.value(channels)
        b.value(channels)
    fn = b.fn
    return b.call(run=lambda x, *rest: fn(x, groups, *rest, eps=0.1))


def local_response_norm(b: Builder) -> OpCall:
    b.value(b.some(4), b.number(2, 3), *(b.some(3) for _ in range(b.number(1, 2))))
    return b.call(2, alpha=0.5)


def prelu(b: Builder) -> OpCall:
    shape = (b.some(4), b.some(3), *b.pick((), (2,)))
    b.value(*shape)
    b.value(b.pick(1, shape[1]))
    return b.call()


def loss(b: Builder) -> OpCall:
    shape = b.shape(1)
    for _ in range(3 if b.name == "margin_ranking_loss" else 2):
        b.value(*shape)
    fn, reduction = b.fn, b.pick("sum", "none", "mean")
    return b.call(run=lambda *xs: fn(*xs, reduction=reduction))


def row_loss(b: Builder) -> OpCall:
    rows, size = b.some(4), b.some(3)
    for _ in range(2 if b.name.startswith("cosine") else 3):
        b.value(rows, size)
    if b.name.startswith("cosine"):
        b.value(rows, fixed=True)
    fn, reduction = b.fn, b.pick("sum", "none", "mean")
    return b.call(run=lambda *xs: fn(*xs, reduction=reduction))


def drops_channels(b: Builder) -> OpCall:
    b.value(*b.shape(2))
    return b.call(0.5, True, drawn=True) if b.pick(True, False) else b.call(0.5, False)


def norm_except(b: Builder) -> OpCall:
    shape = b.shape(1, 3)
    b.value(*shape)
    return b.call(2, b.number(-1, len(shape) - 1))


def weight_norm(b: Builder) -> OpCall:
    shape = [b.some(4) for _ in range(b.number(1, 3))]
    # Of a vector, each element over its own length is a sign, which has no gradient.
    dim = b.number(-1, len(shape) - 1) if len(shape) > 1 else -1
    b.value(*shape)
    b.value(*(n if d == dim else 1 for d, n in enumerate(shape)) if dim >= 0 else ())
    return b.call(dim)


_GATES = {"lstm": 4, "lstm_cell": 4, "gru": 3, "gru_cell": 3}


def recurrent(b: Builder) -> OpCall:
    layers, directions, is_first = b.pick(1, 1, 2), b.pick(1, 1, 2), b.pick(False, True)
    has_biases, samples = b.pick(True, False), b.some(4)
    steps, ins, hidden = b.some(3), b.some(2), b.some(2)
    b.value(*((samples, steps) if is_first else (steps, samples)), ins)
    states = 2 if b.name == "lstm" else 1
    for _ in range(states):
        b.value(layers * directions, samples, hidden)
    rows = _GATES.get(b.name, 1) * hidden
    for k in range(layers * directions):
        b.value(rows, ins if k < directions else hidden * directions)
        b.value(rows, hidden)
        for _ in range(2 * has_biases):
            b.value(rows)
    fn = b.fn

    def run(x: Any, *rest: Any) -> Any:
        hx = list(rest[:2]) if states == 2 else rest[0]
        given = (has_biases, layers, 0.0, False, directions == 2, is_first)
        return fn(x, hx, list(rest[states:]), *given)

    return b.call(run=run)


def recurrent_cell(b: Builder) -> OpCall:
    samples, ins, hidden = b.some(4), b.some(3), b.some(2)
    b.value(samples, ins)
    states = 2 if b.name == "lstm_cell" else 1
    for _ in range(states):
        b.value(samples, hidden)
    rows = _GATES.get(b.name, 1) * hidden
    b.value(rows, ins)
    b.value(rows, hidden)
    for _ in range(b.pick(0, 2)):
        b.value(rows)
    fn = b.fn

    def run(x: Any, *rest: Any) -> Any:
        hx = list(rest[:2]) if states == 2 else rest[0]
        return fn(x, hx, *rest[states:])

    return b.call(run=run)
