"""Find which recorded tensors a recorded tensor was computed from, by autograd's graph.

Whatever lies between two recorded tensors is passed over. A tensor without a gradient is
in no graph: nothing is known of where it comes from.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def origins(tensors: Sequence[Tensor]) -> list[list[int]]:
    """For each tensor, return the places in `tensors` of what it was computed from."""
    own = {_node(x): place for place, x in enumerate(tensors) if _node(x) is not None}
    return [_reached(_node(x), own) for x in tensors]


def _node(x: Tensor) -> Any:
    """Return what stands for the tensor in the graph: a leaf is there as itself."""
    return x.grad_fn if x.grad_fn is not None else (id(x) if x.requires_grad else None)


def _reached(start: Any, own: dict[Any, int]) -> list[int]:
    found: set[int] = set()
    seen: set[Any] = set()
    waiting = _before(start)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in own:
            found.add(own[node])
        else:
            waiting += _before(node)
    return sorted(found)


def _before(node: Any) -> list[Any]:
    """Return the nodes to which backward goes on; a leaf by its tensor's id."""
    nodes = [n for n, _ in getattr(node, "next_functions", ()) if n is not None]
    return [id(n.variable) if hasattr(n, "variable") else n for n in nodes]
