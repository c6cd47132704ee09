"""What errors call a tensor: the code that stands in the user's line."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that users give it
from torch import Tensor, nn

from placements import (
    I,
    P,
    PlacementError,
    R,
    all_reduce,
    assert_type,
    set_current_mesh,
    typecheck,
)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Block(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(weight)])
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[0]


# A line in which p is Partial and r is Replicate -> what the operands are called.
LINES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "a method's result": (lambda p, r: p.view(-1, 4) + r, ["p.view(-1, 4)", "r"]),
    "an operator's result": (lambda p, r: p * 2 + r, ["p * 2", "r"]),
    "the right side": (lambda p, r: r + p * 2, ["r", "p * 2"]),
    "a reflected operator": (lambda p, r: 3 / (p * 2), ["p * 2"]),
    "items of a list": (lambda p, r: torch.cat([p * 2, r]), ["p * 2", "r"]),
    "a keyword": (lambda p, r: torch.add(p * 2, other=r * 2), ["p * 2", "r * 2"]),
    "the receiver": (lambda p, r: p.clone().exp(), ["p.clone()"]),
    "a function": (lambda p, r: F.relu(p[0:1]), ["p[0:1]"]),
    "a comparison": (lambda p, r: p * 2 > r, ["p * 2", "r"]),
    "a sign": (lambda p, r: ~(p > 0), ["p"]),
    "several lines": (
        lambda p, r: torch.add(
            p.reshape(
                4,
            ),
            r[0],
        ),
        ["p.reshape(4)", "r[0]"],
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_an_operand_is_called_by_its_code(name: str) -> None:
    line, names = LINES[name]
    with set_current_mesh({"a": 2}), typecheck():
        p = assert_type(torch.ones(1, 4), {"a": P})
        r = assert_type(torch.ones(1, 4), {"a": R})
        with pytest.raises(PlacementError) as caught:
            line(p, r)
    found = [operand.partition(" f32")[0] for operand in caught.value.operands]
    assert found == names
    assert caught.value.name in names


def test_values_that_are_kept_somewhere_are_called_by_their_place() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        pair = Pair(*(assert_type(torch.ones(2, 4), {"a": t}) for t in (P, R)))
        held: dict[str, list[Tensor]] = {"q": [pair.first]}
        with pytest.raises(PlacementError) as caught:
            pair.first + pair.second
        assert caught.value.name == "pair.first"
        with pytest.raises(PlacementError) as caught:
            held["q"][0].exp()
        assert caught.value.name == "held['q'][0]"


def test_an_in_place_operator() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        p = assert_type(torch.ones(2), {"a": P})
        r = assert_type(torch.ones(2), {"a": R})
        with pytest.raises(PlacementError) as caught:
            p += r * 2
        assert [o.partition(" f32")[0] for o in caught.value.operands] == ["p", "r * 2"]


def test_the_argument_of_a_collective() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        r = assert_type(torch.ones(2), {"a": R})
        with pytest.raises(PlacementError) as caught:
            all_reduce(r * 2, "a", src=P, dst=R)
        assert caught.value.name == "r * 2"
        with pytest.raises(PlacementError) as caught:
            all_reduce(r * 2, "a", src=R, dst=R)
        assert caught.value.name == "r * 2"


def test_parameters_without_a_type_are_to_be_declared() -> None:
    block = Block(torch.ones(4, 4))
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.ones(2, 4), {"a": I})
        with pytest.raises(PlacementError) as caught:
            block(x)
        assert caught.value.name == "self.weights.0"
        assert caught.value.advice.startswith("declare(self, {'weights.0': {'a': ...}})")
        with pytest.raises(PlacementError) as caught:
            block.linear(x)
        assert caught.value.name == "block.linear.weight"
        assert caught.value.advice.startswith("declare(block, {'linear.weight': ")
        with pytest.raises(PlacementError) as caught:
            x @ block.weights[0]
        assert caught.value.advice.startswith("declare(block, {'weights.0': ")


def test_code_without_source_is_no_obstacle() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        p = assert_type(torch.ones(2), {"a": P})
        with pytest.raises(PlacementError) as caught:
            exec("(p * 2).exp()", {"p": p})
        assert caught.value.name == "input"


def test_a_call_that_a_module_of_torch_makes_is_not_mixed_up_with_the_line() -> None:
    weigh = nn.Softmax(-1)
    with set_current_mesh({"a": 2}), typecheck():
        p = assert_type(torch.ones(2, 4), {"a": P})
        with pytest.raises(PlacementError) as caught:
            weigh(p * 2)
        assert caught.value.name == "input"
