"""Judge a model: refused, accepted with a false type, or passed with true types alone.

Every result that a rank gives a type other than Varying is put together over the ranks as
the type says, and compared with the result of one device in the same step. Gradients of
parameters are compared in the same way; where a rank has none, it adds nothing to the sum.

A loss that is Varying is declared to be Partial, by the test and not by the checker. If the
losses of the ranks do not add up to that of one device, this is not true of the model, and
its gradients say nothing: "no sum".
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from placements import PlacementError, S, V
from placements.testing.compare.one_device import difference, largest, tolerance_of
from placements.types.axis import Varying
from placements.types.index import Index
from placements.types.meaning import join
from tests.models.architectures import Architecture
from tests.models.calls import inputs_of, model_of
from tests.models.draws import Drawn
from tests.models.runs import AXIS, RANKS, Result, Run, on_a_rank, on_one_device
from tests.models.steps import Step, line_of, line_of_error

KINDS = {"S": S(0), "V": V}
PASSED, REFUSED, FALSE, ABSENT = "passed", "refused", "false", "absent"
NO_SUM = "no sum"


@dataclass(frozen=True)
class Verdict:
    """What became of one model in one setting."""

    model: str
    setting: "Setting"
    outcome: str
    op: str = ""
    line: str = ""
    reason: str = ""
    compared: int = 0  # results with a type that claims something, all true
    varying: int = 0  # results that are Varying

    def __str__(self) -> str:
        head = f"{self.model} {self.setting}: {self.outcome}"
        if self.outcome == PASSED:
            return f"{head}, {self.compared} results compared, {self.varying} Varying"
        return f"{head}: {self.op} at {self.line}: {self.reason}"


@dataclass(frozen=True)
class Setting:
    """How the model is run."""

    kind: str  # of the inputs: S or V
    mode: str  # train or eval
    attention: str  # eager or sdpa

    def __str__(self) -> str:
        return f"{self.kind} {self.mode} {self.attention}"


def judge(architecture: Architecture, setting: Setting) -> Verdict:
    """Run one model on one device and on all ranks, and compare."""

    def said(
        outcome: str, op: str = "", line: str = "", reason: str = "", **more: Any
    ) -> Verdict:
        return Verdict(architecture.name, setting, outcome, op, line, reason, **more)

    is_training = setting.mode == "train"
    inputs = inputs_of(architecture)
    drawn: Drawn = {}
    try:
        model = model_of(architecture, setting.attention, is_training)
        wanted = on_one_device(deepcopy(model), inputs, drawn)
    except (ValueError, RuntimeError, TypeError) as error:  # the model cannot do that
        return said(ABSENT, "one device", line_of_error(error), _first_line(error))
    runs: list[Run] = []
    for rank in range(RANKS):
        runs.append(on_a_rank(deepcopy(model), inputs, KINDS[setting.kind], rank, drawn))
        error = runs[-1].error
        if error is not None:
            return said(REFUSED, op_of(error), line_of_error(error), rule_of(error))
    return _compared(said, wanted, runs)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]


def op_of(error: BaseException) -> str:
    if isinstance(error, PlacementError):
        return error.where.partition(" at ")[0] or error.headline.partition(" at ")[0]
    return type(error).__name__


def rule_of(error: BaseException) -> str:
    if isinstance(error, PlacementError):
        return error.rule or error.headline.partition(": ")[2]
    return _first_line(error)


def _compared(said: Any, wanted: Run, runs: list[Run]) -> Verdict:
    compared = varying = 0
    loosest = 0.0  # once a result was rounded to a lower dtype, all later ones are
    for step in runs[0].results:
        for k, first in enumerate(runs[0].results[step]):
            if first.value.is_floating_point():
                loosest = max(loosest, tolerance_of(first.value.dtype))
            if first.type is None or isinstance(first.type[AXIS], Varying):
                varying += 1
                continue
            wrong = _wrong(
                step, k, first, wanted.results, [r.results for r in runs], loosest
            )
            if wrong:
                return said(FALSE, step[0], line_of(step), wrong)
            compared += 1
    total = sum(run.loss for run in runs)
    unit = max(1.0, abs(wanted.loss), *(abs(run.loss) for run in runs))
    if runs[0].is_said and abs(total - wanted.loss) > 10 * loosest * unit:
        reason = f"the ranks' add up to {total:.4g}, and one device has {wanted.loss:.4g}"
        return said(NO_SUM, "loss", "the loss", reason)
    for name, one in wanted.gradients.items():
        held = [run.gradients.get(name) for run in runs]
        known = next((gradient.type for gradient in held if gradient is not None), None)
        zeros = Result(torch.zeros_like(one.value), known)
        if known is None or (None in held and known[AXIS].letter != "P"):
            return said(FALSE, "gradient", name, "no gradient on a rank")
        wrong = _differ(one.value, [g or zeros for g in held], known, loosest)
        if wrong:
            return said(FALSE, "gradient", name, wrong)
        compared += 1
    return said(PASSED, compared=compared, varying=varying)


def _wrong(
    step: Step, k: int, first: Result, wanted: Any, ranks: list[Any], tolerance: float
) -> str:
    if step not in wanted or len(wanted[step]) <= k:
        return f"{first.type!r} in a step that one device does not make"
    found = [results[step][k] for results in ranks if step in results]
    if len(found) < len(ranks):
        return f"{first.type!r} in a step that another rank does not make"
    return _differ(wanted[step][k].value, found, first.type, tolerance)


def _counted_over_all(rank: int, result: Result) -> torch.Tensor:
    """An index of each rank's own rows, as one device counts these rows."""
    domain = result.type.index if result.type is not None else None
    if isinstance(domain, Index) and domain.cuts:
        ((_, extent),) = domain.cuts
        return extent.over(RANKS).to_global(result.value, rank)
    return result.value


def _differ(one: torch.Tensor, found: list[Result], known: Any, tolerance: float) -> str:
    if known is None:
        return "has no type"
    for result in found:
        if result.type is None or str(result.type) != str(known):
            return f"{known!r} on rank 0 and {result.type!r} on another"
    try:
        pieces = [_counted_over_all(k, result) for k, result in enumerate(found)]
        whole = join(pieces, found[0].type or {}, {AXIS: RANKS})
    except (ValueError, RuntimeError) as error:
        return f"{known!r}, but {_first_line(error)}"
    if one.is_complex():
        whole, one = torch.view_as_real(whole), torch.view_as_real(one)
    unit = min(1.0, max(largest(one) if one.is_floating_point() else 1.0, 1e-2))
    off = difference(whole, one, unit)
    return f"{known!r} is off by {off:.2g}" if off > tolerance else ""
