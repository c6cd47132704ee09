"""A module's state keeps its identity and its type: it is written in place."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from placements import PlacementError, R, S, V, _torch, assert_type, declare, typecheck
from tests.support.checked import mesh_of

mesh = mesh_of(tp=4)


class Balance(nn.Module):
    bias_E: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias_E", torch.zeros(4))
        self.register_buffer("late", None)
        self.bias_E = torch.ones(4)  # nobody has seen the first one
        self.weight = nn.Parameter(torch.ones(4))
        self.extra = nn.Parameter(torch.ones(4))
        declare(self, {"bias_E": {"tp": R}, "weight": {"tp": R}})

    def forward(self) -> Tensor:
        return self.bias_E * self.weight

    def update_out_of_place(self, step_E: Tensor) -> None:
        self.bias_E = self.bias_E + step_E

    def update(self, step_E: Tensor) -> None:
        with torch.no_grad():
            self.bias_E.add_(step_E)


def test_replacing_a_buffer_is_refused() -> None:
    balance = Balance()
    held = balance.state_dict(keep_vars=True)["bias_E"]
    with typecheck():
        balance()
        step_E = assert_type(torch.ones(4), {"tp": R})
        with pytest.raises(PlacementError, match="the buffer is replaced") as caught:
            balance.update_out_of_place(step_E)
        assert caught.value.where.startswith("Balance.bias_E at test_buffers.py:")
        assert caught.value.name == "bias_E"
        assert "bias_E.copy_(...)" in str(caught.value)
        balance.update(step_E)
    assert held is balance.bias_E and torch.equal(held, torch.full((4,), 2.0))
    balance.update_out_of_place(torch.ones(4))  # checking is off


def replace_parameter(module: Any) -> None:
    module.weight = nn.Parameter(torch.zeros(4))


def register_again(module: Any) -> None:
    module.register_buffer("bias_E", torch.zeros(4))


def register_parameter_again(module: Any) -> None:
    module.register_parameter("weight", param=nn.Parameter(torch.zeros(4)))


def by_name(module: Any) -> None:
    setattr(module, "bias_E", torch.zeros(4))  # noqa: B010


@pytest.mark.parametrize(
    "replace", [replace_parameter, register_again, register_parameter_again, by_name]
)
def test_other_ways_to_replace_state_are_refused(replace: Any) -> None:
    with typecheck(), pytest.raises(PlacementError, match="is replaced by another"):
        replace(Balance())


def test_what_is_no_replacement_passes() -> None:
    with typecheck():
        balance: Any = Balance()  # assignments in __init__
        balance.bias_E = balance.bias_E
        balance.bias_E += 1
        balance.weight = balance.weight
        balance.late = torch.zeros(2)
        balance.extra = nn.Parameter(torch.zeros(4))  # not declared
        balance.note = torch.zeros(2)  # no state
        assert balance.bias_E.tolist() == [2] * 4
        balance.bias_E = None
    assert set(balance.state_dict()) >= {"weight", "extra"}


def loaded(module: nn.Module) -> None:
    module.load_state_dict(copy.deepcopy(module.state_dict()))


def assigned(module: nn.Module) -> None:
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)


@pytest.mark.parametrize("change", [loaded, assigned, copy.deepcopy])
def test_torch_may_replace_state(change: Any) -> None:
    balance = Balance()
    with typecheck():
        balance()
        with torch.no_grad():
            for x in (*balance.parameters(), *balance.buffers()):
                assert_type(x, {"tp": R})
        change(balance)


WRITES = {
    "add_": lambda b, v: b.add_(v),
    "sub_": lambda b, v: b.sub_(v),
    "mul_": lambda b, v: b.mul_(v),
    "copy_": lambda b, v: b.copy_(v),
    "lerp_": lambda b, v: b.lerp_(v, 0.5),
    "addcmul_": lambda b, v: b.addcmul_(v, v),
    "masked_fill_": lambda b, v: b.masked_fill_(v > 0, 1.0),
    "setitem": lambda b, v: b.__setitem__(slice(None), v),
    "row": lambda b, v: b[:2].add_(v[:2]),
    "data": lambda b, v: b.data.add_(v),
    "detach": lambda b, v: b.detach().copy_(v),
    "out": lambda b, v: torch.add(v, v, out=b),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_replicated_buffer_is_not_written_with_values_of_each_rank(name: str) -> None:
    """B31: counts that were not reduced over tp, in a bias that is replicated."""
    balance = Balance()
    with typecheck(), torch.no_grad():
        balance()
        counts_E = assert_type(torch.ones(4), {"tp": V})
        bias_E = balance.bias_E
        with pytest.raises(PlacementError):
            WRITES[name](bias_E, counts_E)
        cut = assert_type(torch.ones(4), {"tp": S(0)})
        with pytest.raises(PlacementError):
            WRITES[name](bias_E, cut)
    assert torch.equal(balance.bias_E, torch.ones(4))


def test_a_parameter_in_place_of_a_declared_buffer_is_refused() -> None:
    balance: Any = Balance()
    with typecheck(), pytest.raises(PlacementError, match="the buffer is replaced"):
        balance.bias_E = nn.Parameter(torch.zeros(4))


class Counted(Balance):
    def register_buffer(self, name: str, tensor: Tensor | None, **rest: Any) -> None:
        super().register_buffer(name, tensor, **rest)


def test_a_class_with_a_method_of_its_own_is_watched_too() -> None:
    with typecheck(), pytest.raises(PlacementError, match=r"Counted\.bias_E"):
        Counted().register_buffer("bias_E", torch.zeros(4))


def test_leaving_puts_modules_back() -> None:
    before = [dict(hooks) for hooks in _torch.REGISTRATION_HOOKS]
    with typecheck():
        held = [dict(hooks) for hooks in _torch.REGISTRATION_HOOKS]
        assert all(a != b for a, b in zip(held, before, strict=True))
    assert before == [dict(hooks) for hooks in _torch.REGISTRATION_HOOKS]
