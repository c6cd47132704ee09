"""What a step of an optimizer of torch begins with: gradients that are summed, and state.

The ops of the step are checked like any others. An unreduced gradient would be refused by
one of them, as an argument without a name; here it is refused by the name of its parameter.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from placements.runtime import tags
from placements.runtime.callsite import located, parameter_name
from placements.runtime.describe import described
from placements.runtime.errors import mismatch
from placements.runtime.state import current
from placements.types.axis import R
from placements.types.tensor import TensorType


def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise PlacementError for a gradient that is still Partial; give state its types."""
    mode = current.mode
    if mode is None or mode.lenient:
        return
    for k, (name, parameter) in enumerate(_parameters(optimizer)):
        known = tags.get(parameter)
        if known is None or known.fresh is not None:
            continue
        _check_gradient(k, name, parameter, known)
        for state in optimizer.state.get(parameter, {}).values():
            if isinstance(state, Tensor) and tags.get(state) is None:
                _put_type(parameter, known, state)


def _parameters(optimizer: Optimizer) -> Iterator[tuple[str | None, Tensor]]:
    for group in optimizer.param_groups:
        names = group.get("param_names") or [None] * len(group["params"])
        yield from zip(names, group["params"], strict=True)


def _check_gradient(k: int, name: str | None, parameter: Tensor, known: TensorType) -> None:
    grad = parameter.grad  # the mode gives it its type
    found = None if grad is None else tags.get(grad)
    if grad is None or found is None:
        return
    for axis, t in found.items():
        if t.letter == "P" and known[axis].letter != "P":
            what = name or parameter_name(parameter)
            of = repr(what) if what else f"parameter {k} of the optimizer"
            raise mismatch(
                located("step"), f"the gradient of {of}", axis, "Replicate", "Partial",
                rule="each rank holds one summand of the gradient: its parameter would "
                "differ by rank after the step",
                operands=[described(parameter, known, what), described(grad, found)],
                advice="reduce_gradients(module) after backward, before the step",
            )  # fmt: skip


def _put_type(parameter: Tensor, known: TensorType, state: Tensor) -> None:
    """Give the state of a parameter, made or loaded outside of the block, its type.

    A tensor of the parameter's shape is what the parameter is, and a single number is
    equal on all ranks. State of other shapes stays without a type, and its use is refused.
    """
    if state.shape == parameter.shape:
        tags.put(state, TensorType(known.mesh, known.types, known.orders))
    elif state.dim() == 0:
        tags.put(state, TensorType(known.mesh, (R,) * len(known.mesh.axes)))
