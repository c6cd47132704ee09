"""Who sees a call of torch: modes, transforms, scripts, torch.compile, hooks of modules."""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from placements._torch.supported import inside

_C: Any = torch._C

# Torch functions called inside are seen by no mode and no subclass.
unseen: Any = getattr(_C, "DisableTorchFunction", nullcontext)
is_unseen: Any = getattr(_C, "_is_torch_function_all_disabled", None)

# The stack of torch-function modes of this thread. The methods of the mode itself are
# Python; these are C, so that a signal cannot come between them and what goes with them.
push_mode: Any = getattr(_C, "_push_on_torch_function_stack", None)
pop_mode: Any = getattr(_C, "_pop_torch_function_stack", None)
count_modes: Any = getattr(_C, "_len_torch_function_stack", None)
mode_at: Any = getattr(_C, "_get_function_stack_at", None)


def modes() -> list[Any]:
    """Return the torch-function modes of this thread, outermost first."""
    return [mode_at(k) for k in range(count_modes())]


def without_dispatch_modes() -> Any:
    """Return a block in which no dispatch mode sees what is called."""
    if _C._len_torch_dispatch_stack() == 0:
        return nullcontext()
    return inside("torch.utils._python_dispatch._disable_current_modes")()


# What torch.jit.script makes: functions, and methods of modules.
SCRIPTED: tuple[Any, ...] = (_C.ScriptFunction, _C.ScriptMethod)


def stance() -> tuple[Any, str, Any] | None:
    """Return where torch.compile keeps its stance, and the one that runs code as written.

    None if nothing was compiled yet in this process: torch.compile is not imported to ask.
    """
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return None
    return frames, "_stance", frames.DynamoStance("force_eager")


# check(condition): compiled code may rely on it, and looks at it in each run.
check: Any = torch._check


def is_eager() -> bool:
    """Return whether torch.compile has the stance that runs code as it is written."""
    kept = stance()
    return kept is not None and getattr(kept[0], kept[1]).stance == "force_eager"


# What torch calls, hook(module, name, value), before a module gets a buffer or a parameter,
# in whichever way it gets it. Putting a hook here is one C call; torch's own functions
# that do it are Python, and replacing methods of nn.Module costs 40 times as much.
REGISTRATION_HOOKS: tuple[dict[Any, Any], ...] = (
    nn.modules.module._global_buffer_registration_hooks,
    nn.modules.module._global_parameter_registration_hooks,
)

# What torch calls, hook(optimizer, args, kwargs), before a step of any optimizer.
STEP_HOOKS: dict[Any, Any] = _global_optimizer_pre_hooks


def mask_makers() -> tuple[Any, tuple[str, ...]] | None:
    """Return the module of flex_attention, and its functions that make masks of blocks.

    They number rows inside `vmap`. None if nobody imported the module yet in this process.
    A name that this torch lacks is left out: calling `vmap` in a block is refused then.
    """
    module: Any = sys.modules.get("torch.nn.attention.flex_attention")
    if module is None:
        return None
    return module, tuple(name for name in _MASK_MAKERS if hasattr(module, name))


_MASK_MAKERS = (
    "create_mask", "_convert_mask_to_block_mask", "_create_sparse_block_from_block_mask",
    "_create_empty_block_mask",
)  # fmt: skip
