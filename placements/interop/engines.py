"""What an engine is asked: run a program, and say the type of every value.

An engine declares inputs in its own way, runs the text of each statement with its own
names in scope, and reads the type of the result back into our words. A statement that
raises what the engine raises to refuse is refused; a statement that raises anything else
crashed the engine, which is no verdict. Nothing runs after either.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import placements
from placements._torch import unseen
from placements.interop.fake_world import quiet
from placements.testing.programs import FLOAT, Input, Program, Statement, evaluate
from placements.types.axis import AxisType
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType, make

# The error of a verdict that is no refusal: the result has a type, but none of ours.
NO_WORD = "no word of ours"


@dataclass(frozen=True)
class Verdict:
    """What an engine says of one statement: a type, or why not."""

    type: TensorType | None
    message: str = ""
    error: str = ""  # the name of the exception
    # What the engine raised when it failed: it has neither accepted nor refused.
    crash: Exception | None = field(default=None, compare=False)

    @property
    def accepted(self) -> bool:
        return self.type is not None or self.error == NO_WORD

    def __str__(self) -> str:
        if self.type is not None:
            return repr(self.type)
        if self.crash is not None:
            return f"crashed: {self.error}: {self.message}"
        return f"{'says' if self.accepted else 'refused'}: {self.message}"


class Engine(ABC):
    """One checker of programs."""

    name: str
    names: Mapping[str, Any]  # the collectives and the types, as the engine calls them
    refusals: tuple[type[BaseException], ...]  # what it raises to refuse a program

    def refuses(self, error: BaseException) -> bool:
        """Return whether an error is a refusal; else the engine crashed.

        A refusal says something: an assertion without a word is about the engine.
        """
        crash = isinstance(error, RecursionError) or not str(error)
        return isinstance(error, self.refusals) and not crash

    @abstractmethod
    def checking(self, mesh: Mesh) -> AbstractContextManager[Any]:
        """Return a block in which every op is checked."""

    def on_threads(self) -> AbstractContextManager[Any]:
        """Return a block around ranks that are threads, each of which enters `checking`."""
        return nullcontext()

    def running(self, mesh: Mesh) -> AbstractContextManager[Any]:
        """Return a block in which the same programs run, and nothing is checked."""
        return quiet()

    def locally(self, body: Callable[[], Any], outs: Any) -> Any:
        """Return the result of `body`, where dims are not followed; `outs` is its type."""
        return body()

    @abstractmethod
    def declare(self, local: Tensor, t: TensorType) -> Any:
        """Return a value of that type; ValueError if the engine cannot say it."""

    @abstractmethod
    def type_of(self, value: Any, mesh: Mesh) -> TensorType:
        """Return the type of a value, in our words; ValueError if it has none of ours."""

    def says(self, t: AxisType) -> AxisType | None:
        """Return our type in the engine's words; None if it has no word for it."""
        return t

    def projected(self, t: TensorType) -> TensorType | None:
        """Return a type of ours as the engine would say it, if it can."""
        said = {axis: self.says(one) for axis, one in t.items()}
        complete = {axis: one for axis, one in said.items() if one is not None}
        return make(t.mesh, complete) if len(complete) == len(said) else None

    def can_declare(self, program: Program) -> bool:
        """Return whether the engine can say the types of the program's inputs."""
        mesh = program.mesh
        return all(self.projected(x.type_on(mesh)) is not None for x in program.inputs)


class Running:
    """A program that an engine runs, one statement after the other; use as a context."""

    def __init__(self, engine: Engine, program: Program) -> None:
        self.engine, self.program, self.mesh = engine, program, program.mesh
        self.values: list[Any] = []
        # Made outside the checkers, which would give a factory's result a type.
        self._locals = [stand_in(x, self.mesh) for x in program.inputs]
        self._stack = ExitStack()

    def __enter__(self) -> "Running":
        self._stack.enter_context(self.engine.checking(self.mesh))
        try:
            for x, local in zip(self.program.inputs, self._locals, strict=True):
                self.values.append(self.engine.declare(local, x.type_on(self.mesh)))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def run(self, statement: Statement) -> Verdict:
        """Run a statement; its value is there for the next ones if it is accepted."""
        value, verdict = self._evaluated(statement.text, self.values)
        if verdict.accepted:
            self.values.append(value)
        return verdict

    def ask(self, text: str, types: Mapping[int, Mapping[str, AxisType]]) -> Verdict:
        """Return the verdict on a statement if some values had these types instead."""
        values = list(self.values)
        for k, given in types.items():
            with unseen():  # so that the copy has no type yet
                held = values[k].detach().clone()
                held.requires_grad_(values[k].requires_grad)
            try:
                values[k] = placements.assert_type(held, given)
            except ValueError as error:  # a dim that the tensor does not have
                return Verdict(None, first_line(error), type(error).__name__)
        return self._evaluated(text, values)[1]

    def _evaluated(self, text: str, values: Sequence[Any]) -> tuple[Any, Verdict]:
        try:
            value = evaluate(text, values, self.engine.names)
        except Exception as error:
            crash = None if self.engine.refuses(error) else error
            return None, Verdict(None, first_line(error), type(error).__name__, crash)
        try:
            return value, Verdict(self.engine.type_of(value, self.mesh))
        except ValueError as error:
            return value, Verdict(None, first_line(error), NO_WORD)


def stand_in(x: Input, mesh: Mesh) -> Tensor:
    """Return a local tensor for an input; types do not depend on what it holds."""
    shape = x.local_shape(mesh)
    if x.kind == FLOAT:
        return torch.ones(shape, dtype=torch.float64, requires_grad=True)
    return torch.zeros(shape, dtype=torch.int64)


def run(engine: Engine, program: Program) -> list[Verdict]:
    """Return the verdict on every statement up to the first that is refused."""
    verdicts: list[Verdict] = []
    with Running(engine, program) as running:
        for statement in program.statements:
            verdicts.append(running.run(statement))
            if verdicts[-1].type is None:
                break
    return verdicts


def first_line(error: Exception) -> str:
    """Return what an exception says, in one line and without addresses or places."""
    text = str(error).strip().split("\n")[0] or type(error).__name__
    text = re.sub(r" at [\w./<>-]+:\d+", "", text)
    # The peer's name of a group depends on what the process made before.
    text = re.sub(r"\b(default_pg|mesh_\w+)(\[[\d:,]*\])?", "<group>", text)
    return re.sub(r"\s+", " ", text)


class Ours(Engine):
    """The checker of this package, on a mesh of sizes alone."""

    name = "placements"
    refusals = (placements.PlacementError,)
    names: Mapping[str, Any] = {
        name: getattr(placements, name)
        for name in "R I V P S all_reduce all_gather reduce_scatter all_to_all "
        "redistribute convert reinterpret".split()
    }

    def checking(self, mesh: Mesh) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(quiet())
        stack.enter_context(placements.set_current_mesh(mesh))
        stack.enter_context(placements.typecheck())
        return stack

    def declare(self, local: Tensor, t: TensorType) -> Tensor:
        return placements.assert_type(local, t)

    def type_of(self, value: Tensor, mesh: Mesh) -> TensorType:
        found = placements.type_of(value)
        assert found is not None
        return found
