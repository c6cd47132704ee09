"""The memory of a tensor, what is saved with it, the hooks of its gradient; autograd."""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Callable
from operator import attrgetter
from typing import Any, cast

import torch
import torch.utils._pytree as _pytree
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.hooks import RemovableHandle

from placements._torch import guarded

# Nested tuples, lists and dicts of tensors.
pytree: Any = _pytree


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor's memory was written in place."""
    return -1 if tensor.is_inference() else tensor._version


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that this one is a view of."""
    return tensor._base


def memory_of(tensor: Tensor) -> Any:
    """Return the memory of a tensor, one object for all its views, which keeps attributes.

    None of a tensor that has none of its own: inside `vmap`.
    """
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


def bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of its memory that a tensor may touch, and the end."""
    size, start = tensor.element_size(), int(tensor.storage_offset())
    if not tensor.numel():
        return start * size, start * size
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = start + sum((n - 1) * int(step) for n, step in steps)
    return start * size, (last + 1) * size


def storage_identity(storage: torch.UntypedStorage) -> int:
    """Return a number that is the same for all names of one memory."""
    return storage._cdata


def leave_out_of_pickles(*prefix: str) -> None:
    """Save tensors without those of their attributes whose names begin like one of these.

    torch pickles the attributes of a tensor with it, so a file would hold classes that
    `torch.load(weights_only=True)` refuses, and that whoever loads it may not have.
    A tensor without such attributes is pickled as ever. `deepcopy` does not come here.
    """
    original = cast(Any, Tensor).__getstate__
    if getattr(original, "left_out", None) == prefix:
        return  # the package was imported twice

    def __getstate__(self: Tensor) -> Any:  # noqa: N807
        state: Any = original(self)
        if isinstance(state, tuple):  # of a subclass with slots
            attributes, *rest = cast(tuple[Any, ...], state)
            return (_without(prefix, attributes), *rest)
        return _without(prefix, state)

    cast(Any, __getstate__).left_out = prefix
    cast(Any, Tensor).__getstate__ = __getstate__


def attribute_of_tensors(name: str, *read: str) -> Callable[[Tensor], Any]:
    """Return a C function that reads an attribute of tensors: None where it was not set.

    The class answers for tensors without it. `getattr` with a default would be a call of
    Python for each operand of each checked op. If it is said what else to `read`, the
    function returns that as a tuple; dots lead to attributes of attributes.
    """
    setattr(Tensor, name, None)
    return attrgetter(*(read or (name,)))


def _without(prefix: tuple[str, ...], attributes: Any) -> Any:
    if not attributes or not any(name.startswith(prefix) for name in attributes):
        return attributes
    return {k: v for k, v in attributes.items() if not k.startswith(prefix)}


def on_accumulation(leaf: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `hook(leaf)` each time backward has added to the gradient of a leaf."""
    return leaf.register_post_accumulate_grad_hook(hook)


def on_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `hook(gradient)` each time backward has the gradient of a tensor."""
    return tensor.register_hook(hook)


def hooks_of(leaf: Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks of a leaf: for its gradient, and for after the gradient is added.

    These are the dicts that autograd reads, so that what is put there is called.
    """
    kept = cast(Any, leaf)
    return kept._backward_hooks or {}, kept._post_accumulate_grad_hooks or {}


def in_backward() -> bool:
    """Return whether autograd is at work, as it is when a checkpoint computes again."""
    if torch.compiler.is_dynamo_compiling():
        return guarded.in_backward
    return backward_pass() != -1


def in_transform() -> bool:
    """Return whether a transform is open: vmap, grad, jvp and others of torch.func.

    A level of forward-mode differentiation (`torch.autograd.forward_ad`) is one as well. An
    op of one's own, and a Function with one `forward`, are not known to them: an op without
    a rule for tangents drops them.
    """
    if forward_ad._current_level >= 0:
        return True
    return torch._C._are_functorch_transforms_active()


def backward_pass() -> int:
    """Return a number for the backward pass that runs in this thread; -1: none does."""
    return torch._C._current_graph_task_id()


def backward_node() -> Any:
    """Return the node whose hooks or backward run in this thread; None outside backward."""
    return torch._C._current_autograd_node() if in_backward() else None


def leaf_of(node: Any) -> Tensor | None:
    """Return the leaf to whose gradient a node adds; None of any other node."""
    return getattr(node, "variable", None)


def before_node(node: Any, hook: Callable[[Tensor | None], None]) -> RemovableHandle:
    """Call `hook(gradient)` for what reaches a node, after the hooks of its tensors."""

    def each(grads: tuple[Tensor | None, ...]) -> None:
        for grad in grads:
            hook(grad)

    return node.register_prehook(each)
