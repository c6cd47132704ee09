"""Programs in other words are compared with one device as they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from placements import I, Padded, S
from placements.interop.fake_world import on_mesh
from placements.interop.spmd_types import SpmdTypes
from placements.testing import RankFailure, check_as_it_is, device_mesh
from placements.types.mesh import Mesh
from tests.migrate.patterns import BEFORE, PEER, pattern

# Patterns whose results have gradients, and take nothing but tensors.
PATTERNS = (
    "local_tensors",
    "replicated_weights",
    "column_row_parallel",
    "uneven_sequences",
)


def on_its_mesh(program: Callable[..., Any], mesh: dict[str, int]) -> Callable[..., Any]:
    """Return a program of `spmd_types` or DTensor with what it expects to be set."""

    def running(**held: Tensor) -> Any:
        with on_mesh(device_mesh()), SpmdTypes(local=True).running(Mesh(mesh)):
            return program(**held)

    return running


def check(name: str, program: Callable[..., Any]) -> None:
    of = pattern(name).of_one_device
    inputs = {n: (x, of.HELD[n]) for n, x in of.INPUTS.items()}
    outs = list(of.RESULTS.values())
    check_as_it_is(on_its_mesh(program, of.MESH), of.program, inputs, outs, mesh=of.MESH)


@pytest.mark.parametrize("words", [BEFORE, PEER])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_right_program_is_equal_and_a_wrong_one_is_not(name: str, words: str) -> None:
    one = pattern(name)
    check(name, one.program(words))
    wrong = one.wrong(words)
    assert wrong is not None
    with pytest.raises(
        AssertionError, match=r"is not that of one device|is no global value"
    ):
        check(name, wrong)


def test_results_are_counted_and_uneven_pieces_named() -> None:
    x = {"x": (torch.arange(10.0).double().view(5, 2), {"tp": S(0, Padded(5))})}
    uneven = {"tp": S(0, Padded(5))}
    check_as_it_is(lambda x: x * 2, lambda x: x * 2, x, uneven, mesh={"tp": 2})
    with pytest.raises(AssertionError, match="result 0"):
        check_as_it_is(lambda x: x * 2, lambda x: x * 3, x, uneven, mesh={"tp": 2})
    with pytest.raises(RankFailure, match="outs has 2 types for 1 results"):
        check_as_it_is(lambda x: x, lambda x: x, x, [uneven, uneven], mesh={"tp": 2})
    with pytest.raises(AssertionError, match="no global value"):
        check_as_it_is(lambda x: x.sum(0), lambda x: x.sum(0), x, {"tp": I}, mesh={"tp": 2})
