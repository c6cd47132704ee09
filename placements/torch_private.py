"""What is used of torch beyond its public API, in one place.

- `unseen()`: torch functions called inside are seen by no mode and no subclass.
- `op_name`: the qualified name of an operator of `torch.ops`.
- `version_of`: how often a tensor's memory was written in place.
- `on_accumulation`, `on_gradient`: hooks, whose signatures torch leaves open.
- `in_backward`, `backward_pass`: whether one is running in this thread, and which.
- `backward_node`, `leaf_of`, `before_node`: the node of the graph that backward is at.
- `leave_out_of_pickles`: what torch saves of the attributes of a tensor.
- `functional`: the collectives under torch's functional ones, which compile, the fake
  backend and autograd all accept.
"""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

unseen: Any = torch._C.DisableTorchFunction

functional: Any = torch.ops._c10d_functional


def op_name(func: object) -> str | None:
    """`aten::mm` of an operator; None of any other function."""
    if isinstance(func, torch._ops.OpOverload):
        func = func.overloadpacket
    if isinstance(func, torch._ops.OpOverloadPacket):
        return str(func._qualified_op_name)
    return None


def version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def on_accumulation(leaf: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `hook(leaf)` each time backward has added to the gradient of a leaf."""
    return leaf.register_post_accumulate_grad_hook(hook)


def on_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `hook(gradient)` each time backward has the gradient of a tensor."""
    return tensor.register_hook(hook)


def in_backward() -> bool:
    """Whether autograd is at work, as it is when a checkpoint computes again."""
    return backward_pass() != -1


def backward_pass() -> int:
    """A number for the backward pass that runs in this thread; -1: none does."""
    return torch._C._current_graph_task_id()


def backward_node() -> Any:
    """The node whose hooks or backward are running in this thread; None: no backward."""
    return torch._C._current_autograd_node() if in_backward() else None


def leaf_of(node: Any) -> Tensor | None:
    """The leaf to whose gradient a node adds; None of any other node."""
    return getattr(node, "variable", None)


def before_node(node: Any, hook: Callable[[Tensor | None], None]) -> RemovableHandle:
    """Call `hook(gradient)` for what reaches a node, after the hooks of its tensors."""

    def each(grads: tuple[Tensor | None, ...]) -> None:
        for grad in grads:
            hook(grad)

    return node.register_prehook(each)


def leave_out_of_pickles(prefix: str) -> None:
    """Save tensors without those of their attributes whose names begin with `prefix`.

    torch pickles the attributes of a tensor with it, so a file would hold classes that
    `torch.load(weights_only=True)` refuses, and that whoever loads it may not have.
    A tensor without such attributes is pickled as ever. `deepcopy` does not come here.
    """
    original = cast(Any, Tensor).__getstate__

    def __getstate__(self: Tensor) -> Any:  # noqa: N807
        state: Any = original(self)
        if isinstance(state, tuple):  # of a subclass with slots
            attributes, *rest = cast(tuple[Any, ...], state)
            return (_without(prefix, attributes), *rest)
        return _without(prefix, state)

    cast(Any, Tensor).__getstate__ = __getstate__


def _without(prefix: str, attributes: Any) -> Any:
    if not attributes or not any(name.startswith(prefix) for name in attributes):
        return attributes
    return {k: v for k, v in attributes.items() if not k.startswith(prefix)}
