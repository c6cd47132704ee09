"""Compiled code runs annotated functions without their checks."""

from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from placements import On, typed


def test_compiled_code_runs_annotated_functions_erased() -> None:
    @typed
    def scaled(x_T: Annotated[Float[Tensor, " T"], On(tp="t")]) -> Tensor:
        return x_T * 2

    compiled = torch.compile(scaled, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
