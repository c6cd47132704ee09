"""Flows of random ops: whether ranks that hold equal values still do afterwards.

`shared` are the mesh axes on which the caller says that all ranks' generators are in
the same state; on the others every rank draws its own numbers.
"""

from typing import Any

from placements.inference import padding
from placements.inference.combine import combine
from placements.inference.op import Op
from placements.inference.rules import DRAWS
from placements.inference.terms import Operand, Refusal, Term
from placements.types.axis import BY_LETTER, AxisType, R, Shard, V
from placements.types.mesh import Mesh
from placements.types.tensor import MADE, TensorType, make

_DRAW = {(draw.letter, draw.shared): draw for draw in DRAWS}


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
    inplace: bool = False,
    *,
    shared: frozenset[str],
) -> TensorType:
    """The identity when nothing is dropped; else a product with a random mask."""
    if p == 0 or not training:
        return combine(op.linearity, [Term(input, tuple(range(input.ndim)))])
    return masked(input, shared).with_pads(padding.times_mask(input))


def sample(
    op: Op, input: Operand, *args: Any, shared: frozenset[str], **kwargs: Any
) -> TensorType:
    """bernoulli, multinomial: numbers drawn with these probabilities."""
    cut = input.type.order(input.ndim - 1) if op.name == "multinomial" else ()
    if op.name == "multinomial":
        padding.require_whole(input, -1)
    if cut:
        raise Refusal(
            "a draw needs the probabilities of all choices, and this rank holds a piece",
            cut[0], input, "a dim that is not cut",
        )  # fmt: skip
    return masked(input, shared)


def like(
    op: Op, input: Operand, *args: Any, shared: frozenset[str], **kwargs: Any
) -> TensorType:
    """Fresh numbers in the shape of `input`, or in its place."""
    for extra in (*args, *kwargs.values()):
        if isinstance(extra, Operand):
            raise Refusal(
                "numbers drawn around one tensor and as wide as another: draw them plain, "
                "then multiply and add",
                operand=extra,
                expected="a Python number",
            )
    if op.name == "normal" and input.type.fresh is None:
        return masked(input, shared)  # torch.normal(mean): its values count, too
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
    op: Op, mesh: Mesh, *args: Any, shared: frozenset[str], **kwargs: Any
) -> TensorType:
    """Fresh numbers in a shape of the rank's own."""
    types = {axis: R if axis in shared else V for axis in mesh.axes}
    return make(mesh, types, fresh=MADE)
