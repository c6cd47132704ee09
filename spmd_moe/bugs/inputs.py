"""Values for the programs: small whole numbers, so that sums are exact."""

import torch
import torch.distributed as dist
from torch import Tensor

from placements import Index, assert_type, current_mesh, split
from placements.types.axis import TypesLike


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Whole numbers from -3 to 3, as float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


def mine(
    value: Tensor, types: TypesLike, *, grad: bool = False, index: Index | None = None
) -> Tensor:
    """This rank's part of a global value, declared; with `grad` a leaf of autograd."""
    mesh = current_mesh()
    assert mesh is not None
    held = split(value, types, mesh)[dist.get_rank()].requires_grad_(grad)
    return assert_type(held, types, index=index)
