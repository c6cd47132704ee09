"""What assert_spmd_equivalent and check_spmd_case do not take, and what they say of it."""

import subprocess
import sys
from typing import Annotated, Any

import pytest
import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn

from placements import On, P, Padded, R, S, V, declare, typed
from placements.testing import assert_spmd_equivalent, check_spmd_case
from placements.testing.compare.case import refusal

Rows = Annotated[Float[Tensor, "T D"], On(tp=S(0))]


@typed
def doubled(x_TD: Rows) -> Rows:
    return x_TD * 2


def doubled_whole(x_TD: Tensor) -> Tensor:
    return x_TD * 2


def required(x_TD: Rows, scale: float) -> Tensor:
    return x_TD * scale


def positional(x_TD: Rows, /) -> Tensor:
    return x_TD


def listed(x_TD: list[Rows]) -> Tensor:
    return x_TD[0]


def nowhere(x_TD: Rows, w_D: Float[Tensor, " D"]) -> Tensor:
    return x_TD * w_D


def shapeless(x_TD: Annotated[Tensor, On(tp=S(0))]) -> Tensor:
    return x_TD


def varying(x_TD: Annotated[Float[Tensor, "T D"], On(tp=V)]) -> Tensor:
    return x_TD


def deep_cut(x_TD: Annotated[Float[Tensor, "T D"], On(tp=S(2))]) -> Tensor:
    return x_TD


def complex_(x_T: Annotated[Complex[Tensor, " T"], On(tp=S(0))]) -> Tensor:
    return x_T


def starred(x: Annotated[Float[Tensor, "*B D"], On(tp=S(0))]) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (torch.exp, "no annotated tensor argument"),
        (required, "argument 'scale' is no annotated tensor.*give it a default"),
        (positional, "argument 'x_TD' is positional-only"),
        (listed, "argument 'x_TD': .* must be one tensor"),
        (nowhere, "argument 'w_D' is a tensor, .*does not say where"),
        (shapeless, "argument 'x_TD': .* must be one tensor"),
        (varying, "argument 'x_TD' is Varying on 'tp'"),
        (deep_cut, "argument 'x_TD': S\\(2\\) on 'tp', but it has 2 dims"),
        (complex_, "argument 'x_T': .*complex.* cannot be drawn"),
        (starred, "argument 'x': dims"),
    ],
)
def test_arguments_that_cannot_be_drawn_are_named(fn: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assert_spmd_equivalent(fn, doubled_whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_ranks": 1}, "max_ranks must be at least 2, got 1"),
        ({"examples": 0}, "examples must be at least 1"),
        ({"max_size": 0}, "max_size must be at least 1"),
        ({"sizes": {"Q": [1]}}, r"no dim 'Q'; the annotations have \['T', 'D'\]"),
        ({"sizes": {"T": []}}, "'T' needs sizes"),
        ({"sizes": {"T": -1}}, "'T' needs sizes"),
        ({"values": {"y": torch.zeros}}, r"no tensor argument 'y'; there are \['x_TD'\]"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assert_spmd_equivalent(doubled, doubled_whole, **options)


@typed
def five_rows(x_TD: Annotated[Float[Tensor, "T D"], On(tp=S(0, Padded(5)))]) -> Tensor:
    return x_TD * 2


@typed
def laid_out(
    x_TD: Annotated[Float[Tensor, "T D"], On(tp="{at}")], at: Any = "S(0)"
) -> Tensor:
    return x_TD * 2


def test_extents_and_references_to_defaults_are_drawn() -> None:
    assert_spmd_equivalent(five_rows, doubled_whole, examples=20)
    assert_spmd_equivalent(laid_out, doubled_whole, examples=20, sizes={"T": 4})
    with pytest.raises(ValueError, match="an extent says that 'T' is 5"):
        assert_spmd_equivalent(five_rows, doubled_whole, sizes={"T": 4})


@typed
def refused(x_T: Annotated[Float[Tensor, " T"], On(tp=P)]) -> Tensor:
    return x_T.exp()


def test_why_all_cases_were_refused_is_shown() -> None:
    with pytest.raises(AssertionError, match=r"only 0 of .* refused") as failure:
        assert_spmd_equivalent(
            refused, lambda x_T: x_T.exp(), sizes={"T": [2]}, max_ranks=2
        )
    assert "exp" in str(failure.value) and "P" in str(failure.value)


def test_a_run_of_empty_tensors_shows_nothing() -> None:
    with pytest.raises(AssertionError, match=r"only 0 of .* refused 0"):
        assert_spmd_equivalent(doubled, doubled_whole, sizes={"T": 0}, examples=10)


class Scaled(nn.Module):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.w_D = nn.Parameter(torch.ones(size))

    @typed
    def forward(self, x_TD: Annotated[Float[Tensor, "T 3"], On(tp=S(0))]) -> Tensor:
        return x_TD * self.w_D


def test_modules_that_do_not_fit_are_refused() -> None:
    module = Scaled()
    with pytest.raises(ValueError, match="parameter 'w_D' has no declared placement"):
        assert_spmd_equivalent(module, Scaled())
    declare(module, {"w_D": {"tp": S(0)}})
    with pytest.raises(ValueError, match="is a module with equal names"):
        assert_spmd_equivalent(module, doubled_whole)
    with pytest.raises(ValueError, match="only the module has 'w_D'"):
        assert_spmd_equivalent(module, nn.ReLU())
    with pytest.raises(ValueError, match=r"2 ranks cannot cut 3 rows evenly"):
        assert_spmd_equivalent(module, Scaled(), max_ranks=2)


X_TD = torch.ones(2, 2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        (X_TD, r"input 'x_TD' must be a tuple \(global value, .*got Tensor"),
        ((X_TD, {"tp": S(5)}), r"input 'x_TD': S\(5\) on 'tp', but it has 2 dims"),
        ((X_TD, {"tp": S(0, Padded(5))}), "input 'x_TD': .*cuts 5 rows"),
        ((X_TD, {"tp": V}), "input 'x_TD' is Varying"),
        ((X_TD, {"dp": R}), "input 'x_TD': no placement"),
        ((X_TD > 0, {"tp": P}), "booleans have no sum"),
    ],
)
def test_inputs_that_are_none_are_not_called_refused(placed: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_spmd_case(doubled, doubled_whole, {"x_TD": placed}, mesh={"tp": 2})


def test_the_reason_of_a_refusal_is_at_hand() -> None:
    inputs = {"x_TD": (X_TD, {"tp": P})}
    assert not check_spmd_case(doubled, doubled_whole, inputs, mesh={"tp": 2})
    found = refusal(doubled, doubled_whole, inputs, mesh={"tp": 2})
    assert "x_TD" in str(found)


@pytest.mark.parametrize(
    ("result", "message"), [(None, "returned no tensor"), ({1}, "a result is a set")]
)
def test_results_that_cannot_be_compared_are_refused(result: Any, message: str) -> None:
    inputs = {"x_TD": (X_TD, {"tp": S(0)})}
    with pytest.raises(ValueError, match=message):
        check_spmd_case(lambda x_TD: result, lambda x_TD: result, inputs, mesh={"tp": 2})


def test_a_star_import_has_it_and_a_plain_one_needs_no_hypothesis() -> None:
    code = (
        "import sys, placements.testing; assert 'hypothesis' not in sys.modules; "
        "from placements.testing import *; assert_spmd_equivalent"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
