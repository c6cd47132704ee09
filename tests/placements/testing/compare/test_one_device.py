"""The comparison with one device: what is equal, what is not, and how that is told."""

import json
import subprocess
import sys
from math import inf, nan
from typing import Any

import pytest
import torch

from placements.testing.compare.one_device import (
    TOLERANCE,
    check_value,
    difference,
    gradients,
    tolerance_of,
)


def of(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (of(), of()),
        (of(1.0, nan, inf, -inf), of(1.0, nan, inf, -inf)),
        (of(1000.0 + 1e-10), of(1000.0)),
        (of(1e-13), of(0.0)),
        (torch.tensor([True]), torch.tensor([True])),
    ],
)
def test_equal_but_for_rounding(found: torch.Tensor, wanted: torch.Tensor) -> None:
    check_value("y", found, wanted)
    assert difference(found, wanted) <= TOLERANCE


@pytest.mark.parametrize(
    ("found", "wanted", "said"),
    [
        (
            of(1.0, 2.0, 5.0),
            of(1.0, 2.0, 3.0),
            "off by 2\n1 of 3 elements differ, the most ",
        ),
        (of(1.0, 5.0), of(1.0, 3.0), "at index (1,): 5.0 on ranks, 3.0 on one device"),
        (of(1e-11), of(0.0), "off by 1e-11"),
        (of(inf), of(1.0), "off by inf"),
        (of(1.0), of(-inf), "off by inf"),
        (of(nan), of(1.0), "at index (0,): nan on ranks"),
        (of(1.0), of(1.0, 1.0), "its shape is (1,), not (2,)"),
        (of(1.0).float(), of(1.0), "its dtype is torch.float32, not torch.float64"),
        (torch.tensor([2**60 + 1]), torch.tensor([2**60]), "1 of 1 elements differ"),
        (torch.tensor([True]), torch.tensor([False]), "True on ranks, False on one device"),
    ],
)
def test_a_difference_is_told(found: torch.Tensor, wanted: torch.Tensor, said: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check_value("y", found, wanted)
    assert str(caught.value).startswith("y is not that of one device: ")
    assert said in str(caught.value)
    if found.dtype == wanted.dtype:
        assert difference(found, wanted) > TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_dtypes_are_given_more_only_if_asked(dtype: torch.dtype) -> None:
    found, wanted = of(1.0 + torch.finfo(dtype).eps, dtype=dtype), of(1.0, dtype=dtype)
    check_value("y", found, wanted, tolerance=tolerance_of(dtype))
    with pytest.raises(AssertionError, match="off by"):
        check_value("y", found, wanted)


def test_an_error_is_relative_to_the_unit() -> None:
    assert difference(of(3e-6), of(1e-6), unit=1e-6) == pytest.approx(1.0)
    assert difference(of(1e-30), of(0.0), unit=0.0) == inf
    assert difference(of(1.0), of(1.0, 1.0)) == inf


def test_gradients_of_inputs_that_are_used() -> None:
    x, unused, fixed = of(2.0).requires_grad_(), of(1.0).requires_grad_(), of(3.0)
    found = gradients([x * fixed, fixed], [of(5.0), of(1.0)], [x, unused, fixed])
    assert found[0] is not None and found[0].item() == 15.0
    assert found[1:] == [None, None]
    assert gradients([fixed], [of(1.0)], [x]) == [None]


def test_a_gradient_that_is_rounding_alone_is_no_difference() -> None:
    """With one expert for each token the gates are one, and the router learns nothing."""
    command = [sys.executable, "-m", "spmd_moe", "check", "--top-k", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    checks: list[dict[str, Any]] = json.loads(done.stdout)["checks"]
    found = [one["simulated"]["differences"]["router.w_gate_ED"] for one in checks]
    assert found and max(found) < 1e-13
