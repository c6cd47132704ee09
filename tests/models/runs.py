"""One run of a model, forward and backward: on one device, or on a rank inside typecheck().

Both keep every result of a torch function by its step (`steps.py`). A rank's results come
with the types that the checker gave them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from placements import P, R, V, assert_type, declare, reinterpret, set_current_mesh, type_of
from placements._torch import unseen
from placements.checker.composed import looked_into
from placements.checker.lookup import resolve
from placements.checker.mode import Typecheck
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType
from tests.models.calls import Inputs, output_of
from tests.models.draws import Drawn, Draws
from tests.models.steps import Step, Steps, op_name, tensors_of

AXIS, RANKS = "dp", 4


class Result(NamedTuple):
    """A result of a step, and its type on a rank."""

    value: Tensor
    type: TensorType | None


@dataclass
class Run:
    """What a run gave: results by step, gradients by parameter."""

    results: dict[Step, list[Result]] = field(default_factory=dict)
    gradients: dict[str, Result] = field(default_factory=dict)
    loss: float = 0.0
    is_said: bool = False  # the loss is Varying, and the test declares it to be a summand
    is_over: bool = False  # what follows is no step of the program
    error: BaseException | None = None


class _Recorder(TorchFunctionMode):
    """Keeps the results on one device."""

    def __init__(self, run: Run, steps: Steps, draws: Draws) -> None:
        super().__init__()
        self._kept = run, steps, draws

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if resolve(func) is looked_into:  # a rank makes its parts as steps of their own
            return _kept(
                self._kept, func, lambda step: looked_into(self, func, args, kwargs or {})
            )
        return _kept(self._kept, func, lambda step: func(*args, **(kwargs or {})))


class Checking(Typecheck):
    """`typecheck()` that keeps the results with their types."""

    def __init__(self, run: Run, steps: Steps, draws: Draws) -> None:
        super().__init__()
        self._kept = run, steps, draws

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _kept(
            self._kept, func, lambda step: self.ask(step, func, types, args, kwargs)
        )

    def ask(self, step: Step, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Check one call and make it."""
        return super().__torch_function__(func, types, args, kwargs)


def _kept(kept: tuple[Run, Steps, Draws], func: Any, call: Callable[[Step], Any]) -> Any:
    run, steps, draws = kept
    step = steps.name(op_name(func))
    draws.begin(step)
    result = call(step)
    with unseen():
        found = [
            Result(tensor.detach().clone(), type_of(tensor))
            for tensor in tensors_of(result)
            if not tensor.is_nested
        ]
    if found and not run.is_over:
        run.results[step] = found
    return result


def _weights(output: Tensor) -> Tensor:
    """Numbers by which the results are weighed, so that each element counts differently."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(output.shape[1:], generator=generator, dtype=torch.float64).to(
        output.dtype
    )


def on_one_device(model: nn.Module, inputs: Inputs, drawn: Drawn) -> Run:
    """Run the global batch in plain torch, and keep what is drawn."""
    run = Run()
    draws = Draws(drawn, None, RANKS)
    torch.manual_seed(4)
    with draws, _Recorder(run, Steps(model), draws):
        output = output_of(model(**inputs))
        loss = (output * _weights(output)).sum()
        run.loss = float(loss.detach())
        loss.backward()
        _keep_gradients(run, model)
    return run


def _keep_gradients(run: Run, model: nn.Module) -> None:
    run.is_over = True
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            with unseen():
                value = gradient.detach().clone()
                run.gradients[name] = Result(value, type_of(gradient))


def on_a_rank(
    model: nn.Module,
    inputs: Inputs,
    kind: Any,
    rank: int,
    drawn: Drawn,
    checking: Callable[[Run, Steps, Draws], Checking] = Checking,
) -> Run:
    """Run a rank's rows of the batch inside typecheck(), with inputs of type `kind`."""
    run = Run()
    draws = Draws(drawn, rank, RANKS)
    pieces = {name: x.chunk(RANKS)[rank].clone() for name, x in inputs.items()}
    declare(model, {"*": {AXIS: R}})
    torch.manual_seed(5 + rank)
    mesh = Mesh({AXIS: RANKS}, {AXIS: rank})
    with set_current_mesh(mesh), draws:
        try:
            with checking(run, Steps(model), draws):
                for x in pieces.values():
                    assert_type(x, {AXIS: kind})
                output = output_of(model(**pieces))
                with unseen():
                    weights = _weights(output)
                loss = (output * assert_type(weights, {AXIS: R})).sum()
                known = type_of(loss)
                with unseen():
                    run.loss = float(loss.detach())
                if known is not None and known[AXIS] == V:
                    loss = reinterpret(loss, AXIS, src=V, dst=P)
                    run.is_said = True
                loss.backward()
                _keep_gradients(run, model)
        except Exception as error:
            run.error = error
    return run
