"""Programs: short straight-line programs are refused, or equal one device.

A program runs on simulated ranks under the checker, with real communication, and on one
device, where a transition does nothing since it keeps the value.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from hypothesis import strategies as st
from torch import Tensor

from placements.annotations.declarations import type_of
from placements.collectives import redistribute
from placements.runtime.mesh import current_mesh
from placements.testing.compare.case import check_spmd_case
from placements.testing.draw.whole_numbers import numbers, seeded
from placements.testing.programs import FLOAT, Input, Program, Statement, Template
from placements.testing.strategies import likely_types, meshes, unsized_types
from placements.types.axis import AxisType, I, P, R, Shard
from placements.types.mesh import Mesh

# Ops that fit square inputs, and what other such ops make of those.
UNARY = tuple(
    map(
        Template,
        (
            "-{a}",
            "relu({a})",
            "{a}.square()",
            "{a}.sum({d}, keepdim=True)",
            "{a}.cumsum({d})",
            "softmax({a}, {d})",
            "{a}.transpose(0, 1)",
            "{a}.flatten().view_as({a})",  # sizes alone are ambiguous for one row
            "{a} * 2",
        ),
    )
)
BINARY = tuple(
    Template(text, (FLOAT, FLOAT))
    for text in ("{a} + {b}", "{a} * {b}", "{a} @ {b}", "{a} - {b}")
)


def run_program(program: Program, **inputs: Tensor) -> Tensor:
    """Return the last value of a program, on this rank or on one device."""
    return program.values(list(inputs.values()), _NAMES)[-1]


def _to(x: Tensor, axis: str, dst: AxisType) -> Tensor:
    """Redistribute from the type that the value has; on one device nothing is done."""
    mesh, known = current_mesh(), type_of(x)
    if mesh is None or known is None or axis not in known:
        return x
    return redistribute(x, axis, src=known[axis], dst=dst)


_NAMES: Mapping[str, Any] = {"to": _to, "R": R, "I": I, "P": P, "S": Shard}


@st.composite
def programs(draw: st.DrawFn, *, max_statements: int = 5, max_ranks: int = 4) -> Program:
    """Draw programs over one to three square inputs."""
    if max_statements < 1:
        raise ValueError(f"programs(max_statements={max_statements}): at least 1")
    mesh = draw(meshes(max_ranks=max_ranks))
    shape = (draw(st.sampled_from([2, 1, 3, 4])),) * 2
    likely = draw(likely_types(mesh=mesh))
    inputs: list[Input] = []
    for _ in range(draw(st.integers(1, 3))):
        layout = draw(unsized_types(mesh=mesh, ndim=2, letters="RSPI", likely=likely))
        first = layout.types(mesh, shape)[0]
        # Inner cuts are left open: they are like torch.chunk of each outer piece.
        types = {
            axis: Shard(t.dim, t.extent if first.order(t.dim)[0] == axis else None)
            if isinstance(t, Shard)
            else t
            for axis, t in first.items()
        }
        inputs.append(Input(shape, tuple(types.items())))
    statements: list[Statement] = []
    for _ in range(draw(st.integers(1, max_statements))):
        statements.append(draw(_statements(mesh, len(inputs) + len(statements))))
    return Program(mesh, tuple(inputs), tuple(statements), draw(st.integers(0, 999)))


@st.composite
def _statements(draw: st.DrawFn, mesh: Mesh, values: int) -> Statement:
    kinds = ["unary", "binary", *(["redistribute"] * 2 if mesh.axes else [])]
    kind = draw(st.sampled_from(kinds))
    # the latest values first: a chain finds more than a bush
    pick = st.integers(0, values - 1).map(lambda k: values - 1 - k)
    if kind == "binary":
        form = draw(st.sampled_from(BINARY))
        return form.statement([draw(pick), draw(pick)])
    if kind == "unary":
        form = draw(st.sampled_from(UNARY))
        return form.statement([draw(pick)], draw(st.integers(0, 1)))
    dst = draw(st.sampled_from([R, I, P, Shard(0), Shard(1)]))
    arg, axis = draw(pick), draw(st.sampled_from(mesh.axes))
    return Statement(f"to(x{arg}, {axis!r}, {dst!r})")


def check_program(program: Program) -> bool:
    """Return whether the checker accepts it; AssertionError if it does so wrongly."""
    inputs = {
        f"x{k}": (numbers(x.shape, seeded(program.seed, k)), dict(x.types))
        for k, x in enumerate(program.inputs)
    }
    try:
        run_program(program, **{name: value for name, (value, _) in inputs.items()})
    except RuntimeError:  # shapes do not fit on one device either
        return False
    run = partial(run_program, program)
    return check_spmd_case(run, run, inputs, mesh=program.mesh.sizes, seed=program.seed)
