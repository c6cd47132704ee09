"""Losses: backward starts where the ranks' losses are one number, and it is its gradient.

The ranks' losses, read as their type says, must join to one number, and the gradients that
`backward()` leaves on the ranks to the gradient of that number. Varying losses are several
numbers, of which none is the loss; pieces are the elements of a tensor.
"""

import torch
from torch import Tensor

from placements.annotations.declarations import assert_type, type_of
from placements.checker.mode import typecheck
from placements.runtime.errors import PlacementError
from placements.runtime.mesh import set_current_mesh
from placements.types.axis import AxisType, I, P, R, Shard, V
from placements.types.extents import Even
from placements.types.meaning import join, split
from placements.types.mesh import Mesh

AXIS = "tp"
MESH = Mesh({AXIS: 2})
PIECES = Shard(0, Even(2, 2))

# letter of the loss -> type of the value that it is made of, whether its elements are
# summed, and the type of the value's gradient
MADE_OF: dict[str, tuple[AxisType, bool, AxisType]] = {
    "R": (R, True, P),
    "I": (I, True, I),
    "P": (PIECES, True, PIECES),
    "S": (PIECES, False, PIECES),
    "V": (V, True, V),
}


def check_loss(letter: str) -> None:
    """Raise AssertionError if backward may start at such a loss wrongly, or may not."""
    src, is_summed, gradient = MADE_OF[letter]
    whole = torch.tensor([1.0, 2.0], dtype=torch.float64)
    if letter == "V":  # a value for every rank
        whole = torch.stack([whole, whole + 2])
    losses: list[Tensor] = []
    grads: list[Tensor] = []
    accepted = True
    for place, held in zip(
        MESH.coordinates(), split(whole, {AXIS: src}, MESH), strict=True
    ):
        x = held.clone().requires_grad_()
        loss = _loss(x, is_summed)
        losses.append(loss.detach())
        grads += torch.autograd.grad(loss, x)
        accepted &= _is_accepted(MESH.seen_from(place), held, src, is_summed, letter)
    loss_type: AxisType = {"R": R, "I": I, "P": P, "S": PIECES, "V": V}[letter]
    try:
        is_one = join(losses, {AXIS: loss_type}, {AXIS: 2}).numel() == 1
        joined = join(grads, {AXIS: gradient}, {AXIS: 2})
        right = is_one and torch.equal(joined, 2 * whole)
    except ValueError:
        right = False
    assert accepted == right, f"a loss that is {letter}: accepted {accepted}, right {right}"


def _loss(x: Tensor, is_summed: bool) -> Tensor:
    return x.square().sum() if is_summed else x.square()


def _is_accepted(
    mesh: Mesh, held: Tensor, src: AxisType, is_summed: bool, letter: str
) -> bool:
    x = held.clone().requires_grad_()
    with set_current_mesh(mesh), typecheck():
        assert_type(x, {AXIS: src})
        loss = _loss(x, is_summed)
        found = type_of(loss)
        assert found is not None and found[AXIS].letter == letter, (letter, found)
        try:
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
        except PlacementError:
            return False
    return True
