"""Kept numbers: zeros, or one number given a shape, moved about, go with any type still.

`torch.zeros(n).view(...)` is added to a Partial, to pieces and to wholes alike, so ops that
move elements without looking at them must not make a Replicate of it.
"""

import torch

from placements._torch import unseen
from placements.annotations.declarations import type_of
from placements.checker.mode import typecheck
from placements.runtime.mesh import set_current_mesh
from placements.testing.cases import OpCall
from placements.testing.laws.comparison import tensors_in
from placements.testing.ranks.crashes import check_judged
from placements.types.mesh import Mesh

# Ops that keep a number: they move elements, or make another number of it.
KEEP_NUMBERS = frozenset(
    "neg negative positive clone contiguous detach to type_as view reshape view_as "
    "reshape_as flatten ravel unflatten permute transpose swapaxes swapdims t T mT adjoint "
    "movedim moveaxis squeeze unsqueeze expand broadcast_to expand_as div __getitem__ "
    "repeat repeat_interleave dropout".split()
)


def _run_plainly(call: OpCall) -> None:
    with unseen():
        call.run(torch.full(call.operands[0].shape, 2.0, dtype=torch.float64))


def is_kept(call: OpCall) -> bool | None:
    """Return whether a number is one afterwards; None if the call shows nothing.

    AssertionError if what is called a number is several.
    """
    if len(call.operands) != 1 or not call.operands[0].has_gradient or call.drawn:
        return None
    with set_current_mesh(Mesh({"tp": 2})), typecheck():
        x = torch.full(call.operands[0].shape, 2.0, dtype=torch.float64)
        try:
            y = tensors_in(call.run(x))[0]
            found = type_of(y)
        except Exception as error:
            check_judged(error, lambda: _run_plainly(call))
            return None
    if found is None or not found.is_number:
        return False
    is_one = not y.numel() or bool((y == y.flatten()[0]).all())
    assert is_one, f"{call!r}: {y} is called one number"
    return True
