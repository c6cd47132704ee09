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


def test_more_typed_functions_compile_than_one_may_be_traced_again() -> None:
    for k in range(12):
        scope = {"typed": typed}
        exec(f"@typed\ndef times(x):\n    return x * {k}", scope)
        compiled = torch.compile(scope["times"], fullgraph=True, backend="eager")
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), float(k)))
