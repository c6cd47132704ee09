"""Modules whose only state is parameters with a declared type."""

from typing import Any

import torch
from torch import nn

from placements import R, declare


class One(nn.Module):
    """A module with one parameter, of the type that is given; None declares nothing."""

    def __init__(self, types: Any, size: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        if types is not None:
            declare(self, {"weight": types})


def of_dtypes(*dtypes: torch.dtype) -> nn.Module:
    """A Replicate parameter of each dtype, with the gradient 10**rank."""
    module, rank = nn.Module(), torch.distributed.get_rank()
    for k, dtype in enumerate(dtypes):
        p = nn.Parameter(torch.zeros(2, dtype=dtype))
        p.grad = torch.full((2,), 10.0**rank, dtype=dtype)
        module.register_parameter(f"w{k}", p)
    declare(module, {f"w{k}": {"dp": R} for k in range(len(dtypes))})
    return module
