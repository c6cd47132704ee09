"""The judge finds planted lies: a type that is false, a gradient, a draw, a lost step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from placements import R, S
from placements.runtime import tags
from placements.runtime.declared import declared
from tests.models import judge as judging
from tests.models.architectures import Architecture
from tests.models.judge import FALSE, NO_SUM, PASSED, REFUSED, Setting, Verdict, judge

HERE = Setting("S", "train", "eager")


class Small(nn.Module):
    """A model of a few lines: a layer, dropout, and whatever a test plants after them."""

    def __init__(self, plant: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.float64)
        self.plant = plant

    def forward(self, x: Tensor) -> tuple[Tensor]:
        y = nn.functional.dropout(self.layer(x), 0.5, self.training)
        return (self.plant(self, y) if self.plant else y,)


def judged(monkeypatch: pytest.MonkeyPatch, plant: Any, setting: Setting = HERE) -> Verdict:
    def made(*_: object) -> nn.Module:
        torch.manual_seed(0)
        return Small(plant)

    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    monkeypatch.setattr(judging, "model_of", made)
    monkeypatch.setattr(judging, "inputs_of", lambda _: {"x": x})
    return judge(Architecture("small", "decoder"), setting)


def test_a_right_model_passes_with_its_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = judged(monkeypatch, None)
    assert verdict.outcome == PASSED, str(verdict)
    assert verdict.compared >= 5  # the layer, dropout, the loss and two gradients


def test_a_refusal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = judged(monkeypatch, lambda self, y: y - y.mean(0))
    assert (verdict.outcome, verdict.op) == (REFUSED, "mean")


def _lie(tensor: Tensor, kind: Any) -> Tensor:
    known = tags.get(tensor)
    if known is not None:  # on a rank
        tags.put(tensor, declared(known.mesh, {"dp": kind}, tuple(tensor.shape)))
    return tensor


def test_a_false_type_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def plant(self: nn.Module, y: Tensor) -> Tensor:
        _lie(y.detach() * 2, R).exp()  # each rank has rows of its own
        return y

    verdict = judged(monkeypatch, plant)
    assert (verdict.outcome, verdict.op) == (FALSE, "exp"), str(verdict)


def test_what_is_nobodys_piece_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def plant(self: nn.Module, y: Tensor) -> Tensor:
        numbers = torch.arange(y.shape[0])  # each rank counts from zero
        return y * _lie(numbers, S(0)).unsqueeze(1)

    verdict = judged(monkeypatch, plant)
    assert (verdict.outcome, verdict.op) == (FALSE, "unsqueeze"), str(verdict)


def test_a_false_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def plant(self: nn.Module, y: Tensor) -> Tensor:
        on_a_rank = tags.get(y) is not None
        y.register_hook(lambda gradient: gradient * (2 if on_a_rank else 1))
        return y

    verdict = judged(monkeypatch, plant)
    assert (verdict.outcome, verdict.op) == (FALSE, "gradient"), str(verdict)


def test_a_step_that_one_device_does_not_make_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdict = judged(
        monkeypatch, lambda self, y: y if tags.get(y) is None else y.exp().log()
    )
    assert verdict.outcome == FALSE, str(verdict)
    assert "does not make" in verdict.reason


def test_a_model_that_looks_across_the_batch_has_no_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdict = judged(
        monkeypatch, lambda self, y: y.softmax(0), Setting("V", "train", "eager")
    )
    assert verdict.outcome == NO_SUM, str(verdict)


def test_a_parameter_that_some_ranks_do_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def plant(self: nn.Module, y: Tensor) -> Tensor:
        chosen = (y[:, 0] > 0).nonzero().flatten()
        if len(chosen.tolist()):
            y = y.index_add(0, chosen, nn.functional.linear(y[chosen], self.layer.weight))
        return y

    verdict = judged(monkeypatch, plant, Setting("V", "train", "eager"))
    assert verdict.outcome == PASSED, str(verdict)
