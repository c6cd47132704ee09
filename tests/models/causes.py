"""All that stands in a model's way, and not only the first refusal.

After a refusal the run goes on: the op is run unchecked, and its result gets the type that
comparing it with one device shows. So one run counts every cause that blocks a model. What
comes out is a list of work, and no verdict: `judge.py` gives those.
"""

from collections import defaultdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from placements import PlacementError, R, S, V
from placements._torch import unseen
from placements.runtime import tags
from placements.runtime.declared import declared
from placements.runtime.mesh import checked_mesh
from tests.models.architectures import Architecture
from tests.models.calls import inputs_of, model_of
from tests.models.draws import Drawn, Draws
from tests.models.judge import KINDS, Setting, op_of, rule_of
from tests.models.runs import AXIS, RANKS, Checking, Result, Run, on_a_rank, on_one_device
from tests.models.steps import Step, Steps, line_of, line_of_error, tensors_of

_RANK = 1  # on the first rank, rows of the whole would look like rows of the piece


class Cause(NamedTuple):
    """A refusal: the op, the rule, and the line of `transformers` that has it."""

    op: str
    rule: str
    line: str


class _GoingOn(Checking):
    def __init__(
        self,
        run: Run,
        steps: Steps,
        draws: Draws,
        *,
        wanted: dict[Step, list[Result]],
        found: list[Cause],
    ) -> None:
        super().__init__(run, steps, draws)
        self._wanted, self._found = wanted, found

    def ask(self, step: Step, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super().ask(step, func, types, args, kwargs)
        except PlacementError as error:
            self._found.append(Cause(op_of(error), rule_of(error), line_of(step)))
            with unseen():
                result = func(*args, **(kwargs or {}))
                given = tensors_of((*args, *(kwargs or {}).values()))
                is_own = any(V in known.types for t in given if (known := tags.get(t)))
                for k, tensor in enumerate(tensors_of(result)):
                    whole = self._wanted.get(step, [])[k : k + 1]
                    kind = _true_type(tensor, whole[0].value if whole else None)
                    kind = V if is_own else kind  # what is made of Varying is Varying
                    shape = tuple(tensor.shape)
                    tags.put(tensor, declared(checked_mesh(), {AXIS: kind}, shape))
            return result


def _true_type(own: Tensor, whole: Tensor | None) -> Any:
    """What a rank's value is: the value of one device, a piece of it, or neither."""
    if whole is None or whole.dim() != own.dim() or whole.dtype != own.dtype:
        return V
    value = own.detach()
    if _close(value, whole):
        return R
    for dim in range(own.dim()):
        if whole.shape[dim] == RANKS * own.shape[dim]:
            if _close(value, whole.chunk(RANKS, dim)[_RANK]):
                return S(dim)
    return V


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)


def causes(architecture: Architecture, setting: Setting) -> list[Cause]:
    """Return every refusal of a model, in the order of the program."""
    inputs, drawn, found = inputs_of(architecture), Drawn(), list[Cause]()
    try:
        model = model_of(architecture, setting.attention, setting.mode == "train")
        wanted = on_one_device(model, inputs, drawn).results
    except (ValueError, RuntimeError, TypeError):  # the model cannot do that
        return []
    model = model_of(architecture, setting.attention, setting.mode == "train")
    going_on = partial(_GoingOn, wanted=wanted, found=found)
    run = on_a_rank(model, inputs, KINDS[setting.kind], _RANK, drawn, going_on)
    if run.error is not None:  # a refusal that is no refusal of an op
        found.append(Cause(op_of(run.error), rule_of(run.error), line_of_error(run.error)))
    return list(dict.fromkeys(found))


def ranked(by_model: dict[str, list[Cause]]) -> str:
    """Return the causes as text, those that block the most models first."""
    blocked: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for model, of_model in by_model.items():
        for cause in of_model:
            blocked[cause.op, cause.rule].setdefault(model, cause.line)
    lines: list[str] = []
    for op, rule in sorted(blocked, key=lambda key: -len(blocked[key])):
        models = blocked[op, rule]
        places = dict.fromkeys(models.values())
        lines += [f"{len(models):3} {op}: {rule}", f"    at {', '.join(list(places)[:4])}",
                  f"    in {', '.join(models)}"]  # fmt: skip
    return "\n".join(lines)
