"""What FSDP2 leaves behind: parameters that it replaced, gradients that it holds back.

Sharding puts a new tensor in the place of a parameter. Whoever still has the old one, an
optimizer or another module, goes on with a tensor that nobody trains, and nothing of torch
says so. Nor does it say that a backward without gradient sync left no gradient to step by.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from placements._torch import is_sharded
from placements.parameters.held import Held
from placements.runtime import tags
from placements.runtime.errors import PlacementError, refused


def refuse_stale(call: str, module: nn.Module, held: Sequence[Held]) -> None:
    """Raise PlacementError for a parameter that cannot be sharded now."""
    for one in held:
        old = tags.replaced(one.tensor)
        if is_sharded(module) or tags.is_replacement(one.tensor):
            raise refused(
                call, f"{one.name!r} is sharded already", name=one.name,
                rule="a parameter belongs to one wrap",
                advice="call it once for each block, and last for the whole model",
            )  # fmt: skip
        if old is not None:
            raise refused(
                call,
                f"{one.name!r} is the tensor that an earlier call sharded as {old!r} and "
                "replaced in that module alone",
                name=one.name,
                rule="a parameter that modules share belongs to one wrap; else they train "
                "two different ones from now on",
                advice="wrap the smallest module that holds all that share it, and none "
                "of them by itself",
            )
        if one.tensor.grad is not None:
            raise refused(
                call, f"{one.name!r} has a gradient, which sharding would drop",
                name=one.name, rule="a sharded parameter is a new one, without a gradient",
                advice="wrap before the first backward, or after "
                "zero_grad(set_to_none=True)",
            )  # fmt: skip


def mark_replaced(module: nn.Module, held: Sequence[Held]) -> None:
    """Remember which tensors a call replaced, so that nobody goes on with the old ones."""
    now = dict(cast(Any, module).named_parameters(remove_duplicate=False))
    for one in held:
        new: Tensor = now[one.name]
        if new is not one.tensor:
            tags.put_replaced(one.tensor, one.name, by=new)
            _watch_optimizers()


_watched: list[Any] = []


def _watch_optimizers() -> None:
    if not _watched:
        _watched.append(register_optimizer_step_pre_hook(_refuse_step))


def _refuse_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = tags.replaced(parameter)
            if name is not None:
                raise refused(
                    f"{type(optimizer).__name__}.step",
                    f"the optimizer holds {name!r} as it was before fully_shard",
                    name=name,
                    rule="sharding replaces parameters; the old ones get no gradient, so "
                    "nothing would be trained",
                    advice="make the optimizer after fully_shard",
                )
            if tags.waits(parameter):
                raise _waiting(f"{type(optimizer).__name__}.step", "a parameter")


def refuse_waiting(call: str, held: Held) -> None:
    """Raise PlacementError if FSDP2 holds a gradient back for a later backward."""
    if tags.waits(held.tensor):
        raise _waiting(call, repr(held.name), held.name)


def _waiting(call: str, words: str, name: str = "") -> PlacementError:
    return refused(
        call,
        f"FSDP2 holds back the gradient of {words}: the last backward that reached it was "
        "told not to reduce",
        name=name,
        rule="without the sum over its ranks there is no gradient to step by",
        advice="set_requires_gradient_sync(True) (and set_requires_all_reduce(True)) "
        "before the last backward of the step",
    )
