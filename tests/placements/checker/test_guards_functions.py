"""A custom autograd.Function says by its placement_rule what it does."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from placements import (
    PlacementError,
    S,
    V,
    assert_type,
    set_current_mesh,
    type_of,
    typecheck,
)


@pytest.fixture(autouse=True)
def mesh() -> Iterator[None]:
    with set_current_mesh({"tp": 4}):
        yield


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


class DeclaredTwice(Twice):
    @staticmethod
    def placement_rule(x: Any) -> Any:
        return x


def test_a_custom_function_must_say_what_it_does() -> None:
    with typecheck():
        x = assert_type(torch.randn(3, requires_grad=True), {"tp": S(0)})
        with pytest.raises(PlacementError, match=r"Twice\.apply") as caught:
            Twice.apply(x)
        assert "placement_rule" in str(caught.value)
        assert type_of(DeclaredTwice.apply(x)) == {"tp": S(0)}
    assert type_of(Twice.apply(torch.ones(2))) is None


class Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2

    @staticmethod
    def placement_rule(x: Any) -> Any:
        return {"tp": V}


def test_a_placement_rule_may_return_a_plain_mapping() -> None:
    with typecheck():
        x = assert_type(torch.ones(3), {"tp": V})
        assert type_of(Rule.apply(x)) == {"tp": V}
