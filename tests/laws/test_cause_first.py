"""`verify()` names the cause, not what follows from it.

Programs are drawn as source code, one step a line; one rank does one of them otherwise, and
what follows is wrong on that rank too. The report must name the planted line.
"""

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import Tensor

import placements
from placements import I, P, PlacementError, R, assert_type, set_current_mesh, verify
from placements._torch import unseen
from placements.testing import device_mesh, run_ranks

FILE = "drawn.py"
MESHES = ({"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2})

# What a step does, and which faults it can have.
STEPS = {
    "cross": "x = assert_type(x * 1.5, TYPES)",
    "draw": "with shared_generator(*TYPES): x = assert_type(dropout(x, 0.2), TYPES)",
    "reduce": "x = all_reduce(convert(x, 'tp', src=I, dst=R) * part(), 'tp', src=P, dst=I)",
}
FAULTS = {
    "another value": (
        "cross",
        STEPS["cross"].replace("x * 1.5", "Shifted.apply(x, float(mine))"),
    ),
    "another draw": ("draw", STEPS["draw"].replace("(x, 0.2", "(reseeded(x), 0.2")),
    "no crossing": ("cross", "x = x * 3 if mine else assert_type(x * 1.5, TYPES)"),
    "no reduction": (
        "reduce",
        STEPS["reduce"].replace("convert(x, 'tp', src=I, dst=R)", "Unreduced.apply(x)"),
    ),
}


@dataclass(frozen=True)
class Planted:
    """Steps, of which the one at `at` has the fault on rank `victim`."""

    mesh: dict[str, int]
    steps: tuple[str, ...]
    fault: str
    at: int
    victim: int

    @property
    def source(self) -> str:
        lines = [STEPS[step] for step in self.steps]
        lines[self.at] = FAULTS[self.fault][1]
        first = "x = assert_type(x, TYPES)"
        every = ["def program(x):", first, *lines, "return x"]
        return "\n    ".join(every) + "\n"

    @property
    def line(self) -> int:
        """Where the report must point: a gradient is that of the step's input."""
        return self.at + 3 - (self.fault == "no reduction")


@st.composite
def planted(draw: st.DrawFn, fault: str) -> Planted:
    mesh = draw(st.sampled_from(MESHES))
    steps = draw(st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=6))
    at = draw(st.integers(0, len(steps) - 1))
    steps[at] = FAULTS[fault][0]
    ranks = torch.Size(mesh.values()).numel()
    victim = draw(st.integers(0, ranks - 1))
    return Planted(mesh, tuple(steps), fault, at, victim)


class _Shifted(torch.autograd.Function):
    @staticmethod
    def placement_rule(x: Any, by: float) -> Any:
        return dict(x)

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        return x + by

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _Unreduced(torch.autograd.Function):
    """Enters a region, as it says; nobody sums the gradient."""

    @staticmethod
    def placement_rule(x: Any) -> Any:
        return {**x, "tp": R}

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def run(case: Planted) -> PlacementError | None:
    """What verify() raises on this rank."""
    types = dict.fromkeys(case.mesh, I)
    rank = dist.get_rank()
    mine = rank == case.victim

    def part() -> Tensor:
        with unseen():
            held = torch.tensor(device_mesh().get_local_rank("tp") + 1.0).double()
        return assert_type(held, {**types, "tp": P})

    def reseeded(x: Tensor) -> Tensor:
        if mine:
            torch.default_generator.manual_seed(99)
        return x

    names: dict[str, Any] = {
        **vars(placements), "TYPES": types, "part": part, "reseeded": reseeded,
        "dropout": torch.nn.functional.dropout, "mine": mine,
        "Shifted": _Shifted, "Unreduced": _Unreduced,
    }  # fmt: skip
    exec(compile(case.source, FILE, "exec"), names)
    x = torch.arange(1.0, 65.0, dtype=torch.float64).requires_grad_()
    try:
        with set_current_mesh(device_mesh()), verify():
            names["program"](x).sum().backward()
    except PlacementError as error:  # on all ranks alike
        return error
    return None


def reported(case: Planted) -> PlacementError:
    first, *others = run_ranks(case.mesh, run, case)
    assert first is not None, f"{case.source}\nnothing is reported"
    assert all(str(other) == str(first) for other in others), f"{case.source}\n{others}"
    return first


@pytest.mark.parametrize("fault", FAULTS)
def test_the_planted_fault_is_reported_first(fault: str) -> None:
    @settings(max_examples=max(10, settings().max_examples // 8))  # each runs all ranks
    @given(planted(fault))
    def law(case: Planted) -> None:
        error = reported(case)
        where = error.where
        assert where.endswith(f"{FILE}:{case.line}"), f"{case.source}\n{error}"
        if fault == "another draw":
            assert where.startswith("dropout at"), f"{case.source}\n{error}"
        assert ("the gradient of" in error.headline) == (fault == "no reduction")

    law()
