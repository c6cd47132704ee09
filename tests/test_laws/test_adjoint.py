"""The dot-product test finds a missing, a doubled and a misplaced reduction."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import placements
from placements import (
    I,
    P,
    R,
    S,
    V,
    all_gather,
    all_reduce,
    all_to_all,
    convert,
    reduce_scatter,
)
from placements.testing import check_adjoint
from placements.transitions import TRANSITIONS, Transition
from placements.types import BY_LETTER, AxisType

MESH = {"tp": 4}
X = torch.arange(6.0, dtype=torch.float64).reshape(2, 3) / 7
W = torch.arange(24.0, dtype=torch.float64).reshape(4, 3, 2).sin()  # one by rank


def right(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce((convert(x, "tp", I, R) @ w).tanh(), "tp", P, I)


def no_copy(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce((x @ w).tanh(), "tp", P, I)


def reduced_for_use_by_rank(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce((convert(x, "tp", I, R) @ w).tanh(), "tp", P, R)


def no_reduction(x: Tensor, w: Tensor) -> Tensor:
    return (convert(x, "tp", I, R) @ w).tanh()


def no_collective(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh()


def through_replicate(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce((x @ w).tanh(), "tp", P, R)


def through_invariant(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce((x @ w).tanh(), "tp", P, I)


def reduced_twice(x: Tensor, w: Tensor) -> Tensor:
    y = convert(convert(x, "tp", I, R), "tp", I, R)
    return all_reduce((y @ w).tanh(), "tp", P, I)


# the table of measurements.md, section 3, and one more
PROGRAMS = [
    (right, I, I, None),
    (no_copy, I, I, "x"),
    (reduced_for_use_by_rank, I, I, "x"),
    (no_reduction, I, I, "x"),
    (no_collective, R, P, None),
    (through_replicate, R, R, None),
    (through_invariant, R, R, "x"),
    (reduced_twice, I, I, "x"),
]


@pytest.mark.parametrize(
    "program, src, dst, guilty", PROGRAMS, ids=lambda p: getattr(p, "__name__", "")
)
def test_programs_of_the_table(program, src, dst, guilty) -> None:
    inputs = {"x": (X, {"tp": src}), "w": (W, {"tp": V})}
    if guilty is None:
        check_adjoint(program, inputs, {"tp": dst}, mesh=MESH)
        return
    with pytest.raises(AssertionError, match=f"gradient of {guilty} is not the adjoint"):
        check_adjoint(program, inputs, {"tp": dst}, mesh=MESH)


def moved(row: Transition, src: AxisType, dst: AxisType, x: Tensor) -> Tensor:
    if row.action == "exchange":
        sizes = [1] * MESH["tp"]
        return all_to_all(x, "tp", V, V, input_split_sizes=sizes, output_split_sizes=sizes)
    call: Any = getattr(placements, row.call)
    return call(x, "tp", src=src, dst=dst)


@pytest.mark.parametrize("row", TRANSITIONS, ids=lambda r: f"{r.call}-{r.src}-{r.dst}")
def test_every_collective_and_cast(row: Transition) -> None:
    """Four rows of four: one for each rank, where a transition unbinds them."""
    src = BY_LETTER.get(row.src, S(0))
    dst = BY_LETTER.get(row.dst, S(1) if row.action == "recut" else S(0))
    numel = 64 if row.src == "V" else 16  # of Varying values every rank's
    x = torch.arange(numel, dtype=torch.float64).sin().reshape(-1, 4, 4)
    inputs = {"x": (x if row.src == "V" else x[0], {"tp": src})}
    check_adjoint(partial(moved, row, src, dst), inputs, {"tp": dst}, mesh=MESH)


def test_uneven_pieces_and_two_inputs() -> None:
    from placements import Padded

    x = torch.arange(10.0, dtype=torch.float64).reshape(5, 2) / 5
    w = torch.arange(4.0, dtype=torch.float64).reshape(2, 2).cos()
    rows = S(0, Padded(5))

    def fn(x: Tensor, w: Tensor) -> Tensor:
        whole = all_gather(x, "tp", rows, R)
        return reduce_scatter((whole @ w).tanh(), "tp", P, rows)

    check_adjoint(
        fn, {"x": (x, {"tp": rows}), "w": (w, {"tp": R})}, {"tp": rows}, mesh={"tp": 2}
    )


def test_the_guilty_input_is_named() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return all_reduce(convert(x, "tp", I, R) @ w.detach(), "tp", P, I)

    with pytest.raises(AssertionError, match="gradient of w"):
        check_adjoint(fn, {"x": (X, {"tp": I}), "w": (W, {"tp": V})}, {"tp": I}, mesh=MESH)


def test_single_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        check_adjoint(lambda x: x, {"x": (X.float(), {"tp": R})}, {"tp": R}, mesh=MESH)
