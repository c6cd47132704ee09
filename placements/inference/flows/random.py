"""Flows of random ops: whether ranks that hold equal values still do afterwards.

`shared` are the mesh axes on which the caller says that all ranks' generators are in
the same state; on the others every rank draws its own numbers.
"""

from dataclasses import replace
from typing import Any

from placements.inference import padding
from placements.inference.combine import combine
from placements.inference.flows.broadcast import terms_of
from placements.inference.op import Op
from placements.inference.rules import DRAWS, NONLINEAR
from placements.inference.sizes import sizes_of, type_of_sizes
from placements.inference.terms import Operand, Refusal, Term
from placements.types.axis import BY_LETTER, AxisType, R, Shard, V
from placements.types.mesh import Mesh
from placements.types.tensor import MADE, TensorType, make

_DRAW = {(draw.letter, draw.shared): draw for draw in DRAWS}


def refuse_own_generator(shared: frozenset[str]) -> None:
    """Refuse a generator of the program's own where draws are said to be equal."""
    for axis in sorted(shared):
        raise Refusal(
            "shared_generator speaks of the default generators, and nobody said that this "
            "one is in the same state on all ranks",
            axis,
            expected="a draw without generator=, or fresh numbers that are declared: "
            "assert_type(torch.rand(n, generator=g), ...) outside of shared_generator",
        )


def masked(input: Operand, shared: frozenset[str]) -> TensorType:
    """A value times a random mask."""
    types: dict[str, AxisType] = {}
    for axis, t in input.type.items():
        draw = _DRAW[t.letter, axis in shared]
        if draw.gives is None:
            raise Refusal(draw.reason, axis, input, "Replicate", kind="policy")
        types[axis] = t if draw.gives == t.letter else BY_LETTER[draw.gives]
    return make(input.type.mesh, types).with_pads(padding.in_shape_of(input))


def dropout(
    op: Op,
    input: Operand,
    p: float = 0.5,
    training: bool = True,
    *,
    shared: frozenset[str],
) -> TensorType:
    """The identity when nothing is dropped; else a product with a random mask."""
    if p == 0 or not training:
        return combine(op.linearity, [Term(input, tuple(range(input.ndim)))])
    return masked(input, shared).with_pads(padding.times_mask(input))


def drops_channels(
    op: Op,
    input: Operand,
    p: float = 0.5,
    training: bool = True,
    *,
    shared: frozenset[str],
) -> TensorType:
    """dropout2d: one draw for each channel of each sample, so the dims after are whole."""
    for dim in range(2, input.ndim) if p and training else ():
        for axis in input.cut_axes(dim):
            raise Refusal(
                "all elements of a channel are dropped together, and this rank holds a "
                "piece of each",
                axis, input, "a dim that is not cut", kind="policy",
            )  # fmt: skip
    return dropout(op, input, p, training, shared=shared)


def sample(op: Op, input: Operand, p: Any = None, *, shared: frozenset[str]) -> TensorType:
    """bernoulli: numbers drawn with the probabilities of `p`, or else of `input`."""
    _refuse_sums(input)
    if not isinstance(p, Operand):
        return masked(input, shared)
    _refuse_sums(p)
    met = combine(NONLINEAR, terms_of([input, p]))
    return masked(replace(input, type=met), shared)


def multinomial(
    op: Op,
    input: Operand,
    num_samples: Any,
    replacement: bool = False,
    *,
    shared: frozenset[str],
) -> TensorType:
    """Rows drawn with these probabilities, which must be whole along the last dim."""
    _refuse_sums(input)
    padding.require_whole(input, -1)
    for axis in input.type.order(input.ndim - 1):
        raise Refusal(
            "a draw needs the probabilities of all choices, and this rank holds a piece",
            axis, input, "a dim that is not cut",
        )  # fmt: skip
    return masked(input, shared)


def _refuse_sums(input: Operand) -> None:
    """A number drawn around a summand is no summand of a number drawn around the sum."""
    for axis, t in input.type.items():
        if t.letter == "P":
            raise Refusal(
                "a draw with the probabilities or means of a sum is not the sum of draws "
                "with those of its parts",
                axis, input, "Replicate",
            )  # fmt: skip


def normal(
    op: Op,
    input: Any = None,
    mean: Any = 0.0,
    std: Any = 1.0,
    size: Any = None,
    dtype: Any = None,
    *,
    shared: frozenset[str],
) -> TensorType:
    """x.normal_(): fresh numbers in place; torch.normal(mean): around each element."""
    if isinstance(input, Operand) and not isinstance(mean, Operand | None):
        if not isinstance(std, Operand):
            return like(op, input, shared=shared)
    if not isinstance(mean, Operand) or isinstance(std, Operand):
        raise Refusal(
            "numbers drawn around one tensor and as wide as another: draw them plain, "
            "then multiply and add",
            operand=next((x for x in (std, mean) if isinstance(x, Operand)), None),
            expected="a Python number",
        )
    _refuse_sums(mean)
    found = masked(mean, shared)
    for n in () if size is None else sizes_of(size):
        for axis in (*(axis for axis, _ in n.cuts), *n.varying):
            if found.by_axis.get(axis) != V:
                raise Refusal(
                    "ranks that draw the same numbers would draw another number of them",
                    axis, mean, "sizes that are equal on all ranks",
                )  # fmt: skip
    return found


def like(op: Op, input: Operand, *, shared: frozenset[str], **settings: Any) -> TensorType:
    """Fresh numbers in the shape of `input`, or in its place."""
    types: dict[str, AxisType] = {}
    for axis, t in input.type.items():
        alone = t if isinstance(t, Shard) else V
        draw = _DRAW[t.letter, axis in shared]
        # What differs by rank may differ in shape too, and then the numbers do.
        if axis in shared and draw.gives is None and input.type.fresh is None:
            raise Refusal(draw.reason, axis, input, "Replicate", kind="policy")
        types[axis] = R if axis in shared else alone
    drawn = make(input.type.mesh, types, fresh=MADE)
    return drawn.with_pads(padding.in_shape_of(input))


def create(
    op: Op, mesh: Mesh, size: Any, *, shared: frozenset[str], **settings: Any
) -> TensorType:
    """Fresh numbers of these sizes; in the sizes of a piece they are a piece."""
    sized = type_of_sizes(mesh, sizes_of(size), MADE)
    types: dict[str, AxisType] = {}
    for axis, t in sized.items():
        if axis in shared and t != R:
            raise Refusal(_DRAW[t.letter, True].reason, axis, None, "plain sizes", "policy")
        types[axis] = t if axis in shared or isinstance(t, Shard) else V
    return make(mesh, types, fresh=MADE)


def permutation(
    op: Op, mesh: Mesh, n: int, dtype: Any = None, *, shared: frozenset[str]
) -> TensorType:
    """randperm: each rank's own, unless the generator is shared and the length plain."""
    types: dict[str, AxisType] = {a: R if a in shared else V for a in mesh.axes}
    return make(mesh, types, fresh=MADE)
