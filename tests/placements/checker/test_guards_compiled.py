"""Compiled code inside a block runs as it is written, so that it is checked."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that users give it

from placements import (
    P,
    PlacementError,
    R,
    S,
    assert_type,
    set_current_mesh,
    type_of,
    typecheck,
)

# In a process of its own, where nothing was compiled before the block.
FIRST = """
import torch
from torch import nn
from placements import S, PlacementError, assert_type, set_current_mesh, typecheck
with set_current_mesh({"tp": 2}), typecheck():
    x = assert_type(torch.ones(3), {"tp": S(0)})
    try:
        torch.compile(nn.ReLU(), backend="eager")(x)
    except PlacementError as error:
        print(error)
"""


def test_a_function_is_checked_again_after_a_refusal() -> None:
    with set_current_mesh({"tp": 2}), typecheck():
        add = torch.compile(lambda a, b: a + b, backend="eager")
        p, r, x = (assert_type(torch.ones(3), {"tp": t}) for t in (P, R, S(0)))
        for _ in range(2):
            with pytest.raises(PlacementError, match="counted once per rank"):
                add(p, r)
            assert type_of(add(x, x)) == {"tp": S(0)}


def test_a_module_that_is_first_compiled_in_a_block_is_refused_by_name() -> None:
    run = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True)
    assert "torch.compile" in run.stdout and "before the block" in run.stdout


@pytest.mark.parametrize("by_name", [False, True])
def test_the_weight_of_l1_loss_is_refused_however_it_is_given(by_name: bool) -> None:
    with set_current_mesh({"tp": 2}), typecheck():
        x = assert_type(torch.ones(3), {"tp": R})
        with pytest.raises(PlacementError, match="weight"):
            if by_name:
                F.l1_loss(x, x, weight=x)
            else:
                F.l1_loss(x, x, None, None, "sum", x)
