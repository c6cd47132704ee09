"""Collectives at the boundary of a module whose code has none."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from placements import (
    I,
    P,
    R,
    S,
    assert_type,
    ledger,
    move_at,
    set_current_mesh,
    type_of,
    typecheck,
)
from placements.testing import device_mesh, run_ranks


class Block(nn.Module):
    """Returns what it was given, as one tensor or as several."""

    def __init__(self, several: bool = False) -> None:
        super().__init__()
        self.several = several

    def forward(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Any:
        y = x * 2
        return (y, more.get("extra"), mask) if self.several else y


def kinds(record: Any) -> list[str]:
    return [entry.kind + " backward" * entry.backward for entry in record.entries]


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("by_name", [True, False])
def test_arguments_and_the_result_are_moved(checked: bool, by_name: bool) -> None:
    def program() -> tuple[Tensor, Tensor, list[str]]:
        with set_current_mesh(device_mesh()), ledger() as record:
            block = Block()
            move_at(block, "tp", before={"x": (S(0), R)}, after=(R, S(0)))
            x = torch.ones(2, 3, requires_grad=True)

            def step() -> Tensor:
                assert_type(x, {"tp": S(0)})
                y: Tensor = block(x=x) if by_name else block(x)
                y.sum().backward()
                return y

            if checked:
                with typecheck():
                    y = step()
                    assert type_of(y) == {"tp": S(0)}
            else:
                y = step()
            assert x.grad is not None
            return y.detach(), x.grad, kinds(record)

    for y, gradient, sent in run_ranks({"tp": 2}, program):
        assert torch.equal(y, torch.full((2, 3), 2.0))
        assert torch.equal(gradient, torch.full((2, 3), 2.0))
        assert sent[0] == "all-gather" and sent[-1] == "reduce-scatter backward"


def test_one_of_several_results_and_a_further_keyword() -> None:
    def program() -> None:
        with set_current_mesh(device_mesh()), typecheck():
            block = Block(several=True)
            move_at(
                block, "tp", before={"extra": (I, R), "mask": (I, R)}, after={0: (P, I)}
            )
            x = assert_type(torch.ones(2), {"tp": P})
            extra = assert_type(torch.ones(2), {"tp": I})
            y, moved, mask = block(x, extra=extra)
            assert type_of(y) == {"tp": I} and type_of(moved) == {"tp": R} and mask is None
            assert y.tolist() == [4.0, 4.0]

    run_ranks({"tp": 2}, program)


def test_a_name_that_forward_does_not_have_is_an_error_at_once() -> None:
    with pytest.raises(
        ValueError, match=r"Linear.forward has no argument 'x'; it has \['input'\]"
    ):
        move_at(nn.Linear(2, 2), "tp", before={"x": (I, R)})


def test_several_results_need_a_position() -> None:
    block = Block(several=True)
    move_at(block, "tp", after=(R, I))
    with (
        set_current_mesh({"tp": 1}),
        pytest.raises(ValueError, match=r"the result of Block.*after=\{0: "),
    ):
        block(torch.ones(2))
