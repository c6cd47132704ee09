"""Optimizers of torch inside the block, in all their forms, do what they do on one device."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from placements import (
    I,
    assert_type,
    declare,
    reduce_gradients,
    set_current_mesh,
    type_of,
    typecheck,
)
from placements.testing import RankFailure, run_ranks
from tests.support.trained import (
    AXES,
    TYPES,
    WHOLE,
    Make,
    on_a_rank,
    on_one_device,
)
from tests.support.trained_equal import check_equal

LOOP, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}
FORMS: dict[str, dict[str, Any]] = {"loop": LOOP, "foreach": FOREACH, "fused": FUSED}
# name -> (optimizer, its settings, whether torch has a fused form)
OPTIMIZERS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "SGD": ("SGD", {}, True),
    "SGD momentum": ("SGD", {"momentum": 0.9, "dampening": 0.1}, True),
    "SGD nesterov": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, True),
    "SGD maximize": ("SGD", {"maximize": True}, True),
    "Adam": ("Adam", {"weight_decay": 0.1}, True),
    "Adam amsgrad": ("Adam", {"amsgrad": True}, True),
    "AdamW": ("AdamW", {}, True),
    "RMSprop": ("RMSprop", {"momentum": 0.9, "centered": True}, False),
    "Adagrad": ("Adagrad", {"lr_decay": 0.1}, True),
    "Adadelta": ("Adadelta", {}, False),
    "Adamax": ("Adamax", {}, False),
    "NAdam": ("NAdam", {}, False),
    "RAdam": ("RAdam", {}, False),
    "ASGD": ("ASGD", {}, False),
    "Rprop": ("Rprop", {}, False),
}
CASES = {
    f"{name}, {form}": (optimizer, {**settings, **FORMS[form]})
    for name, (optimizer, settings, has_fused) in OPTIMIZERS.items()
    for form in FORMS
    if has_fused or form != "fused"
}


def maker(optimizer: str, settings: dict[str, Any]) -> Make:
    kind: Any = getattr(torch.optim, optimizer)
    return lambda model: kind(model.parameters(), lr=0.05, **settings)


@pytest.mark.parametrize("case", CASES)
def test_three_steps_are_those_of_one_device(case: str) -> None:
    make = maker(*CASES[case])
    check_equal(run_ranks(AXES, on_a_rank, make), on_one_device(make), TYPES)


def nothing(model: nn.Module) -> None:
    """What a program does that forgets to sum its gradients."""


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_that_is_not_summed_is_refused_by_name(case: str) -> None:
    with pytest.raises(RankFailure, match="the gradient of 'up' is Partial on axis 'dp'"):
        run_ranks(AXES, on_a_rank, maker(*CASES[case]), nothing)


@pytest.mark.parametrize("form", ["loop", "foreach"])
def test_adafactor_of_whole_parameters(form: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(model.parameters(), lr=0.05, **FORMS[form])

    ranks = run_ranks(AXES, on_a_rank, make, reduce_gradients, WHOLE)
    check_equal(ranks, on_one_device(make), WHOLE)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return torch.optim.Muon(matrices, lr=0.05)


def test_muon_of_whole_parameters() -> None:
    ranks = run_ranks(AXES, on_a_rank, muon, reduce_gradients, WHOLE)
    check_equal(ranks, on_one_device(muon), WHOLE)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.05)


@pytest.mark.parametrize("make", [adafactor, muon])
def test_statistics_of_a_piece_are_refused(make: Make) -> None:
    with pytest.raises(RankFailure, match="the norm of a piece is not the norm of all"):
        run_ranks(AXES, on_a_rank, make)


def resumed(form: dict[str, Any], reload: bool) -> tuple[Any, Any]:
    """A step outside of any block, and another one inside; the types of the moments."""
    linear = nn.Linear(2, 2, dtype=torch.float64)
    with torch.no_grad():
        for k, p in enumerate(linear.parameters()):
            p.copy_(torch.arange(p.numel()).view(p.shape) + k)
            p.grad = torch.full_like(p, 0.5)
    optimizer = torch.optim.Adam(linear.parameters(), lr=0.05, **form)
    optimizer.step()
    with set_current_mesh({"dp": 2}), typecheck():
        declare(linear, {"*": {"dp": I}})
        linear(assert_type(torch.ones(1, 2, dtype=torch.float64), {"dp": I}))
        if reload:
            state = optimizer.state_dict()
            optimizer = torch.optim.Adam(linear.parameters(), lr=0.05, **form)
            optimizer.load_state_dict(state)
        for p in linear.parameters():
            assert p.grad is not None
            p.grad = assert_type(torch.full_like(p, 0.25), {"dp": I})
        optimizer.step()
        moments = [type_of(optimizer.state[p]["exp_avg"]) for p in linear.parameters()]
        return [p.detach().clone() for p in linear.parameters()], moments


def stepped_twice() -> list[Tensor]:
    values = [torch.arange(4.0).double().view(2, 2), torch.arange(2.0).double() + 1]
    parameters = [nn.Parameter(value) for value in values]
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    for gradient in (0.5, 0.25):
        for p in parameters:
            p.grad = torch.full_like(p, gradient)
        optimizer.step()
    return [p.detach() for p in parameters]


@pytest.mark.parametrize("reload", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_state_from_outside_is_what_its_parameter_is(form: str, reload: bool) -> None:
    found, moments = resumed(FORMS[form], reload)
    expected = stepped_twice()
    assert moments == [{"dp": I}] * 2
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
