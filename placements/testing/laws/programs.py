"""Programs: short straight-line programs are refused, or equal one device.

A program is a list of steps over typed inputs. It runs on simulated ranks under the
checker, with real communication, and on one device, where a transition does nothing
since it keeps the value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from torch import Tensor

from placements.annotations.declarations import type_of
from placements.collectives import redistribute
from placements.runtime.mesh import current_mesh
from placements.testing.compare.case import check_spmd_case
from placements.testing.strategies import (
    layouts,
    likely_types,
    meshes,
    numbers,
    seeded,
)
from placements.types.axis import AxisType, I, P, R, Shard, TypesLike
from placements.types.mesh import Mesh


@dataclass(frozen=True)
class Step:
    """One line: an op on values made before (by number), or a transition of one."""

    op: str
    values: tuple[int, ...]
    dim: int = 0
    axis: str = ""
    dst: AxisType = R

    def __repr__(self) -> str:
        operands = ", ".join(f"v{k}" for k in self.values)
        if self.op == "redistribute":
            return f"redistribute({operands}, {self.axis!r}, dst={self.dst!r})"
        return f"{self.op}({operands}, dim={self.dim})"


UNARY = (
    "neg",
    "relu",
    "square",
    "sum",
    "cumsum",
    "softmax",
    "transpose",
    "flatten",
    "double",
)
BINARY = ("add", "mul", "matmul", "sub")


@dataclass(frozen=True)
class Program:
    """Square inputs of `size` rows on one mesh, and steps; the last value is the result."""

    mesh: Mesh
    size: int
    types: tuple[TypesLike, ...]
    steps: tuple[Step, ...]
    seed: int

    def run(self, **inputs: Tensor) -> Any:
        values = list(inputs.values())
        for step in self.steps:
            values.append(_step(step, [values[k] for k in step.values]))
        return values[-1]


def _step(step: Step, operands: Sequence[Tensor]) -> Tensor:
    x = operands[0]
    match step.op:
        case "add":
            return x + operands[1]
        case "sub":
            return x - operands[1]
        case "mul":
            return x * operands[1]
        case "matmul":
            return x @ operands[1]
        case "neg":
            return -x
        case "double":
            return x * 2
        case "relu":
            return x.relu()
        case "square":
            return x.square()
        case "sum":
            return x.sum(step.dim, keepdim=True)
        case "cumsum":
            return x.cumsum(step.dim)
        case "softmax":
            return x.softmax(step.dim)
        case "transpose":
            return x.transpose(0, 1)
        case "flatten":
            return x.flatten().view_as(x)  # sizes alone are ambiguous for one row
        case "redistribute":
            return _moved(x, step)
        case _:
            raise AssertionError(step.op)


def _moved(x: Tensor, step: Step) -> Tensor:
    mesh, known = current_mesh(), type_of(x)
    if mesh is None or known is None or step.axis not in known:
        return x
    return redistribute(x, step.axis, src=known[step.axis], dst=step.dst)


@st.composite
def programs(draw: st.DrawFn, *, max_steps: int = 5, max_ranks: int = 4) -> Program:
    """Programs over one to three square inputs."""
    if max_steps < 1:
        raise ValueError(f"programs(max_steps={max_steps}): at least 1")
    mesh = draw(meshes(max_ranks=max_ranks))
    size = draw(st.sampled_from([2, 1, 3, 4]))
    likely = draw(likely_types(mesh=mesh))
    types: list[TypesLike] = []
    for _ in range(draw(st.integers(1, 3))):
        layout = draw(layouts(mesh=mesh, ndim=2, letters="RSPI", likely=likely))
        first = layout.types(mesh, (size, size))[0]
        # Inner cuts are left open: they are like torch.chunk of each outer piece.
        types.append(
            {
                axis: Shard(t.dim, t.extent if first.order(t.dim)[0] == axis else None)
                if isinstance(t, Shard)
                else t
                for axis, t in first.items()
            }
        )
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, max_steps))):
        steps.append(draw(_steps(mesh, len(types) + len(steps))))
    return Program(mesh, size, tuple(types), tuple(steps), draw(st.integers(0, 999)))


@st.composite
def _steps(draw: st.DrawFn, mesh: Mesh, values: int) -> Step:
    kinds = ["unary", "binary", *(["redistribute"] * 2 if mesh.axes else [])]
    kind = draw(st.sampled_from(kinds))
    # the latest values first: a chain finds more than a bush
    pick = st.integers(0, values - 1).map(lambda k: values - 1 - k)
    if kind == "binary":
        return Step(draw(st.sampled_from(BINARY)), (draw(pick), draw(pick)))
    if kind == "unary":
        return Step(draw(st.sampled_from(UNARY)), (draw(pick),), draw(st.integers(0, 1)))
    dst = draw(st.sampled_from([R, I, P, Shard(0), Shard(1)]))
    return Step("redistribute", (draw(pick),), 0, draw(st.sampled_from(mesh.axes)), dst)


def check_program(program: Program) -> bool:
    """Whether the checker accepts it; AssertionError if it does so wrongly."""
    inputs = {
        f"v{k}": (numbers((program.size, program.size), seeded(program.seed, k)), types)
        for k, types in enumerate(program.types)
    }
    try:
        program.run(**{name: value for name, (value, _) in inputs.items()})
    except RuntimeError:  # shapes do not fit on one device either
        return False
    return check_spmd_case(
        program.run, program.run, inputs, mesh=program.mesh.sizes, seed=program.seed
    )
