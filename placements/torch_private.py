"""What is used of torch beyond its public API, in one place.

- `unseen()`: torch functions called inside are seen by no mode and no subclass.
- `op_name`: the qualified name of an operator of `torch.ops`.
- `version_of`: how often a tensor's memory was written in place.
- `functional`: the collectives under torch's functional ones, which compile, the fake
  backend and autograd all accept.
"""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from typing import Any

import torch
from torch import Tensor

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
