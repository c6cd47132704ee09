"""Several names for one memory: casts, numpy, `.data`, custom ops."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from placements import (
    I,
    P,
    PlacementError,
    R,
    S,
    V,
    assert_type,
    convert,
    declare,
    register_op,
    reinterpret,
    type_of,
)
from placements.checker.lookup import KNOWN
from placements.inference.ops import OPS
from tests.support.checked import checked_on

checked = checked_on(tp=4)


def of(t: Any, *shape: int) -> Tensor:
    return assert_type(torch.ones(*shape or (4,)), {"tp": t})


CASTS: dict[str, tuple[Any, Any, Callable[[Tensor], Tensor]]] = {
    "I to R": (I, R, lambda x: convert(x, "tp", src=I, dst=R)),
    "R to P": (R, P, lambda x: convert(x, "tp", src=R, dst=P)),
    "V to P": (V, P, lambda x: reinterpret(x, "tp", src=V, dst=P)),
    "R to V": (R, V, lambda x: reinterpret(x, "tp", src=R, dst=V)),
}


@pytest.mark.parametrize("name", CASTS)
def test_a_write_through_a_cast_is_refused(name: str) -> None:
    old, new, cast = CASTS[name]
    x = of(old)
    y = cast(x)
    with pytest.raises(PlacementError, match="y is another name for the memory of x") as e:
        y.mul_(2)
    assert e.value.axis == "tp" and "y = y.clone()" in str(e.value)
    row = y[:2]
    with pytest.raises(PlacementError, match="row is another name for the memory of x"):
        row.add_(of(new, 2))
    with pytest.raises(PlacementError, match="another name"):
        torch.nn.functional.dropout(y, 0.0, inplace=True)
    assert torch.equal(x, torch.ones(4)) if name != "R to P" else True
    assert type_of(y.clone().mul_(2)) == {"tp": new}
    x.mul_(
        2
    )  # the old name keeps its type, and the cast of it is the cast of the new value


def test_ordinary_views_may_be_written() -> None:
    x = of(S(1), 3, 4)
    x[0].add_(1)
    x.t().mul_(2)
    x.view(3, -1)[0].relu_()
    x.detach().add_(1)
    assert type_of(x) == {"tp": S(1)}


def test_numpy_reads_and_does_not_write() -> None:
    x = of(R)
    for array in (x.numpy(), x.detach().numpy(), numpy.asarray(x)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 3
    assert x.tolist() == [1.0] * 4
    assert torch.from_numpy(numpy.ones(1)).numpy().flags.writeable  # it has no type


def test_data_keeps_the_type() -> None:
    x, v, r = of(R), of(V), of(R)
    with pytest.raises(PlacementError, match=r"x\.data at .*: x is \{tp:R\}") as caught:
        x.data = v
    assert caught.value.axis == "tp"
    x.data = r
    assert type_of(x) == {"tp": R}


@torch.library.custom_op("placements_effects::honest", mutates_args=())
def honest(x: Tensor) -> Tensor:
    return x + 1


@torch.library.custom_op("placements_effects::declared", mutates_args=("x",))
def declared(x: Tensor) -> Tensor:
    return x.add_(1).clone()


@torch.library.custom_op("placements_effects::liar", mutates_args=())
def liar(x: Tensor) -> Tensor:
    return x.add_(1).clone()


def test_a_custom_op_does_not_write_what_it_is_given() -> None:
    names = [f"placements_effects::{n}" for n in ("honest", "declared", "liar")]
    for name in names:
        register_op(name, like="exp")
    try:
        x = of(V)
        assert type_of(honest(x)) == {"tp": V}
        assert type_of(torch.ops.placements_effects.honest(x)) == {"tp": V}
        for op in (declared, liar, torch.ops.placements_effects.liar):
            with pytest.raises(PlacementError, match="it writes into x"):
                op(x)
        with pytest.raises(PlacementError, match="Partial"):
            honest(of(P))
    finally:
        for name in names:
            del OPS[name]
        KNOWN.clear()


def test_a_module_is_converted() -> None:
    module = nn.Linear(4, 4)
    declare(module, {"weight": {"tp": R}, "bias": {"tp": R}})
    module(of(R))
    module.double().float()
    assert type_of(module(of(R))) == {"tp": R}
