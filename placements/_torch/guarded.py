"""State that compiled code looks at in each call, as attributes of this module.

`torch.compile` cannot trace a call that asks for the state of the thread. It reads the
attribute of a module, and reads it again before each call of what it has compiled: if the
value is another one, the function is traced again.
"""
# pyright: reportPrivateUsage=false

import torch

in_backward: bool  # whether autograd is at work in this thread


def __getattr__(name: str) -> bool:
    if name == "in_backward":
        return torch._C._current_graph_task_id() != -1
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
