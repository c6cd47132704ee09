"""Programs and what our checker says of them: given ones, and drawn ones.

A drawn program is one that we accept up to its last step, since engines are compared up
to the first step that one of them refuses. What torch itself refuses, because shapes fit
neither on a rank nor on one device, says nothing about types and is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from placements._torch import unseen
from placements.interop.engines import Ours, Running, Verdict, evaluate
from placements.interop.programs import (
    FLOAT,
    INTEGER,
    MESHES,
    Choose,
    Program,
    Step,
    choose_inputs,
    choose_step,
)
from placements.testing.ranks.crashes import crash_of
from placements.types.tensor import TensorType

MAX_STEPS = 5
_TRIES = 12


@dataclass(frozen=True)
class Checked:
    """A program, and what our checker says of each step; only the last may be refused."""

    program: Program
    verdicts: tuple[Verdict, ...]

    @property
    def types(self) -> list[TensorType]:
        """The types of all values, inputs first."""
        found = [x.type_on(self.program.mesh) for x in self.program.inputs]
        return found + [v.type for v in self.verdicts if v.type is not None]

    def up_to(self, count: int) -> "Checked":
        program = replace(self.program, steps=self.program.steps[:count])
        return Checked(program, self.verdicts[:count])


def check(program: Program) -> Checked | None:
    """What our checker says of a program; None if torch itself refuses a step."""
    verdicts: list[Verdict] = []
    with Running(Ours(), program) as running:
        for step in program.steps:
            types = Checked(program, tuple(verdicts)).types
            verdict = running.step(step)
            if not _is_answer(verdict, step, running.values, types):
                return None
            verdicts.append(verdict)
            if not verdict.accepted:
                break
    return Checked(program, tuple(verdicts)).up_to(len(verdicts))


def draw_checked(choose: Choose) -> Checked:
    """A program that our checker accepts up to its last step."""
    sizes = choose(MESHES)
    program = Program(tuple(sizes.items()), choose_inputs(choose, sizes), ())
    kinds = [x.kind for x in program.inputs]
    verdicts: list[Verdict] = []
    with Running(Ours(), program) as running:
        for _ in range(_TRIES):
            types = Checked(program, tuple(verdicts)).types
            ndims = [value.dim() for value in running.values]
            step = choose_step(choose, program, kinds, types, ndims)
            if step is None:
                continue
            verdict = running.step(step)
            if not _is_answer(verdict, step, running.values, types):
                continue
            program = replace(program, steps=(*program.steps, step))
            verdicts.append(verdict)
            if not verdict.accepted or len(verdicts) == MAX_STEPS:
                break
            is_float = running.values[-1].dtype.is_floating_point
            kinds.append(FLOAT if is_float else INTEGER)
    return Checked(program, tuple(verdicts))


def _is_answer(
    verdict: Verdict, step: Step, values: Sequence[Tensor], types: Sequence[TensorType]
) -> bool:
    """Whether a verdict is about types, not about shapes that fit nowhere.

    CheckerCrash if our checker failed on what torch itself accepts.
    """
    if verdict.crash is not None:
        if step.move is not None or _runs(step, [tuple(v.shape) for v in values], values):
            raise crash_of(verdict.crash, f": {step.text}")
        return False
    if verdict.accepted:
        return True
    return step.move is not None or _torch_accepts(step, values, types)


def _torch_accepts(
    step: Step, values: Sequence[Tensor], types: Sequence[TensorType]
) -> bool:
    """Whether shapes fit, as one rank holds them or as one device does."""
    held = [tuple(value.shape) for value in values]
    whole = [t.global_shape(shape) for t, shape in zip(types, held, strict=True)]
    return _runs(step, held, values) or _runs(step, whole, values)


def _runs(step: Step, shapes: Sequence[tuple[int, ...]], values: Sequence[Tensor]) -> bool:
    with unseen():
        plain = [
            torch.zeros(shape, dtype=value.dtype)
            for shape, value in zip(shapes, values, strict=True)
        ]
        try:
            evaluate(step.text, plain, {})
        except (RuntimeError, IndexError, ValueError):
            return False
    return True
