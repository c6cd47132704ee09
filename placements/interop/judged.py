"""Programs and what our checker says of them: given ones, and drawn ones.

Our checker accepts a drawn program up to its last statement, since engines are compared up
to the first statement that one of them refuses. What torch itself refuses, because shapes
fit neither on a rank nor on one device, says nothing about types and is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from placements._torch import unseen
from placements.interop.engines import Ours, Running, Verdict
from placements.interop.vocabulary import MOVES, TEMPLATES, move_of, types_of_letters
from placements.testing.programs import (
    FLOAT,
    INTEGER,
    Input,
    Program,
    Statement,
    Template,
    evaluate,
)
from placements.testing.ranks.crashes import crash_of
from placements.types.axis import AxisType, R, Shard, V
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType

# Given options, returns one: hypothesis and a plain random generator draw alike.
Choose = Callable[[Sequence[Any]], Any]

# Small enough to be quick; every dim can be cut over both axes.
MESHES: tuple[Mesh, ...] = (Mesh({"tp": 2}), Mesh({"dp": 2, "tp": 2}))
INPUT_SHAPES: tuple[tuple[int, ...], ...] = ((4, 4), (4,), (4, 4, 4))

MAX_STATEMENTS = 5
_TRIES = 12


@dataclass(frozen=True)
class Judged:
    """A program and our verdict on each statement; only the last may be refused."""

    program: Program
    verdicts: tuple[Verdict, ...]

    @property
    def types(self) -> list[TensorType]:
        """The types of all values, inputs first."""
        found = [x.type_on(self.program.mesh) for x in self.program.inputs]
        return found + [v.type for v in self.verdicts if v.type is not None]

    def up_to(self, count: int) -> "Judged":
        program = replace(self.program, statements=self.program.statements[:count])
        return Judged(program, self.verdicts[:count])


def judge(program: Program) -> Judged | None:
    """Return our verdicts on a program; None if torch itself refuses a statement."""
    verdicts: list[Verdict] = []
    with Running(Ours(), program) as running:
        for statement in program.statements:
            types = Judged(program, tuple(verdicts)).types
            verdict = running.run(statement)
            if not _is_answer(verdict, statement, running.values, types):
                return None
            verdicts.append(verdict)
            if not verdict.accepted:
                break
    return Judged(program, tuple(verdicts)).up_to(len(verdicts))


def draw_judged(choose: Choose) -> Judged:
    """Return a program that our checker accepts up to its last statement."""
    mesh: Mesh = choose(MESHES)
    program = Program(mesh, _choose_inputs(choose, mesh), ())
    kinds = [x.kind for x in program.inputs]
    verdicts: list[Verdict] = []
    with Running(Ours(), program) as running:
        for _ in range(_TRIES):
            types = Judged(program, tuple(verdicts)).types
            ndims = [value.dim() for value in running.values]
            statement = _choose_statement(choose, program, kinds, types, ndims)
            if statement is None:
                continue
            verdict = running.run(statement)
            if not _is_answer(verdict, statement, running.values, types):
                continue
            program = replace(program, statements=(*program.statements, statement))
            verdicts.append(verdict)
            if not verdict.accepted or len(verdicts) == MAX_STATEMENTS:
                break
            is_float = running.values[-1].dtype.is_floating_point
            kinds.append(FLOAT if is_float else INTEGER)
    return Judged(program, tuple(verdicts))


def _choose_input(choose: Choose, mesh: Mesh, kind: str, shape: Any) -> Input:
    letters = "RRSSVI" if kind == INTEGER else "RRSSSPVI"
    axes = list(mesh.sizes)
    if len(axes) > 1 and choose([False, True]):
        axes.reverse()
    types = [(axis, choose(types_of_letters(letters, len(shape)))) for axis in axes]
    left = list(shape)
    for k, (axis, t) in enumerate(types):
        if isinstance(t, Shard):
            if left[t.dim] % mesh.sizes[axis]:
                types[k] = (axis, R)
            else:
                left[t.dim] //= mesh.sizes[axis]
    return Input(shape, tuple(types), kind)


def _choose_inputs(choose: Choose, mesh: Mesh) -> tuple[Input, ...]:
    shape = choose(INPUT_SHAPES)
    shapes = [shape, shape, choose(INPUT_SHAPES)]
    inputs = [_choose_input(choose, mesh, FLOAT, s) for s in shapes]
    if choose([False, True]):
        inputs.append(_choose_input(choose, mesh, INTEGER, choose([(4,), shape])))
    return tuple(inputs)


def _choose_statement(
    choose: Choose,
    program: Program,
    kinds: Sequence[str],
    types: Sequence[TensorType],
    ndims: Sequence[int],
) -> Statement | None:
    """Return another statement over values of these kinds, types and dims."""
    if choose([True, False, False]):
        return _choose_move(choose, program, types, ndims)
    template: Template = choose(TEMPLATES)
    args: list[int] = []
    for kind in template.kinds:
        fitting = [k for k, other in enumerate(kinds) if other == kind]
        if not fitting:
            return None
        args.append(choose(fitting[-3:]))
    if not template.has_dim:
        return template.statement(args)
    if not ndims[args[0]]:
        return None
    return template.statement(args, choose(range(ndims[args[0]])))


def _choose_move(
    choose: Choose, program: Program, types: Sequence[TensorType], ndims: Sequence[int]
) -> Statement | None:
    arg: int = choose(range(len(types)))
    axis: str = choose(list(program.mesh.sizes))
    call: str = choose(list(MOVES))
    sources, targets = (types_of_letters(letters, ndims[arg]) for letters in MOVES[call])
    actual = types[arg][axis]
    # Mostly the type that the tensor has; now and then a claim that is wrong.
    src: AxisType = (
        actual if choose([True, True, True, False]) else choose(sources or [actual])
    )
    dst: AxisType | None = choose(targets) if targets else None
    if not ndims[arg] and (call in ("all_to_all", "reduce_scatter") or dst == V):
        return None  # they move rows, or take one, and a number has none
    return None if dst is None else move_of(call, arg, axis, src, dst)


def _is_answer(
    verdict: Verdict,
    statement: Statement,
    values: Sequence[Tensor],
    types: Sequence[TensorType],
) -> bool:
    """Return whether a verdict is about types, not about shapes that fit nowhere.

    CheckerCrash if our checker failed on what torch itself accepts.
    """
    if verdict.crash is not None:
        if statement.move is not None or _runs(
            statement, [tuple(v.shape) for v in values], values
        ):
            raise crash_of(verdict.crash, f": {statement.text}")
        return False
    if verdict.accepted:
        return True
    return statement.move is not None or _torch_accepts(statement, values, types)


def _torch_accepts(
    statement: Statement, values: Sequence[Tensor], types: Sequence[TensorType]
) -> bool:
    """Return whether shapes fit, as one rank holds them or as one device does."""
    held = [tuple(value.shape) for value in values]
    whole = [t.global_shape(shape) for t, shape in zip(types, held, strict=True)]
    return _runs(statement, held, values) or _runs(statement, whole, values)


def _runs(
    statement: Statement, shapes: Sequence[tuple[int, ...]], values: Sequence[Tensor]
) -> bool:
    with unseen():
        plain = [
            torch.zeros(shape, dtype=value.dtype)
            for shape, value in zip(shapes, values, strict=True)
        ]
        try:
            evaluate(statement.text, plain, {})
        except (RuntimeError, IndexError, ValueError):
            return False
    return True
