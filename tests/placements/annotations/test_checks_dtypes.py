"""Stated dtypes are demanded: of arguments, results, records, parameters and buffers."""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import pytest
import torch
from jaxtyping import BFloat16, Float, Float32, Float64, Int, Shaped
from torch import Tensor, nn

from placements import On, P, PlacementError, R, all_reduce, assert_type, typed
from tests.support.checked import checked_on

checked = checked_on(tp=2)


def of(dtype: torch.dtype, t: Any = R) -> Tensor:
    return assert_type(torch.ones(3, 4, dtype=dtype), {"tp": t})


@typed
def narrowed(
    logits_TE: Annotated[Float32[Tensor, "T E"], On(tp="t")], to: torch.dtype
) -> Annotated[Float32[Tensor, "T E"], On(tp="t")]:
    return logits_TE.to(to)


@typed
def wide(x: Annotated[Float32[Tensor, "T E"] | Float64[Tensor, "T E"], On(tp="t")]) -> None:
    pass


@typed
def whole(x: Int[Tensor, "T E"]) -> None:
    pass


@typed
def floating(x: Float[Tensor, "T E"]) -> None:
    pass


@typed
def anything(x: Shaped[Tensor, "T E"]) -> None:
    pass


@typed
@dataclass(frozen=True)
class Record:
    gates_TE: Annotated[Float32[Tensor, "T E"], On(tp="t")]


@typed
class Pair(NamedTuple):
    gates_TE: Annotated[Float32[Tensor, "T E"], On(tp="t")]


@typed
class Bias(nn.Module):
    bias_TE: Annotated[Float32[Tensor, "T E"], On(tp=R)]
    weight_TE: Annotated[Float[Tensor, "T E"], On(tp=R)]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias_TE", torch.zeros(3, 4))
        self.weight_TE = nn.Parameter(torch.ones(3, 4))

    def forward(self, x_TE: Annotated[Float[Tensor, "T E"], On(tp=R)]) -> Tensor:
        return x_TE + self.bias_TE


def test_an_argument_of_another_dtype_is_refused() -> None:
    with pytest.raises(PlacementError) as caught:
        narrowed(of(torch.bfloat16), torch.float32)
    error = caught.value
    assert error.headline.endswith("logits_TE is bfloat16, expected float32")
    assert (error.name, error.expected, error.actual) == (
        "logits_TE",
        "float32",
        "bfloat16",
    )
    assert [str(fix) for fix in error.fixes] == ["logits_TE.float()"]


def test_a_result_of_another_dtype_is_refused() -> None:
    narrowed(of(torch.float32), torch.float32)
    with pytest.raises(PlacementError, match="return is bfloat16, expected float32"):
        narrowed(of(torch.float32), torch.bfloat16)


@pytest.mark.parametrize("make", [Record, Pair])
def test_a_field_of_another_dtype_is_refused(make: Any) -> None:
    make(of(torch.float32))
    with pytest.raises(PlacementError, match="gates_TE is bfloat16, expected float32"):
        make(of(torch.bfloat16))


def test_one_of_several_dtypes() -> None:
    wide(of(torch.float32))
    wide(of(torch.float64))
    with pytest.raises(PlacementError, match="x is bfloat16, expected float32 or float64"):
        wide(of(torch.bfloat16))
    with pytest.raises(PlacementError, match="does not fit its shape"):
        wide(assert_type(torch.ones(3), {"tp": R}))


def test_a_kind_of_dtype_is_named_by_its_annotation() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        floating(of(dtype))
        anything(of(dtype))
    with pytest.raises(PlacementError, match="x is int64, expected Float") as caught:
        floating(of(torch.int64))
    assert str(caught.value.fixes[0]) == "x.float()"
    with pytest.raises(PlacementError, match="x is float32, expected Int") as caught:
        whole(of(torch.float32))
    assert not caught.value.fixes, "rounding is for the user to say"


def test_a_buffer_of_another_dtype_is_refused() -> None:
    """B70: a correction bias in bf16 keeps 8 of 238 values."""
    module = Bias()
    module(of(torch.float32))
    module.weight_TE.data = module.weight_TE.data.bfloat16()  # any float
    module(of(torch.float32))
    module._buffers["bias_TE"] = module.bias_TE.bfloat16()
    with pytest.raises(PlacementError) as caught:
        module(of(torch.float32))
    assert "self.bias_TE is bfloat16, expected float32" in str(caught.value)
    assert caught.value.name == "self.bias_TE"
    assert "self.bias_TE bf16[T=3, E=4]{tp:R}" in caught.value.operands


@typed
def total(x_TE: Annotated[Float32[Tensor, "T E"], On(tp=P)]) -> Tensor:
    return all_reduce(x_TE, "tp", src=P, dst=R)


def test_the_dtype_of_a_reduction_is_stated_where_it_is_called() -> None:
    with pytest.raises(PlacementError, match="x_TE is bfloat16, expected float32"):
        total(of(torch.bfloat16, P))
    in_bf16 = of(torch.bfloat16, P)
    summed = all_reduce(
        in_bf16, "tp", src=P, dst=R, op_dtype=torch.float32, out_dtype=torch.bfloat16
    )
    assert summed.dtype == torch.bfloat16


def test_a_class_that_states_nothing_of_a_dtype_takes_any() -> None:
    @typed
    class Loose(nn.Module):
        w: Annotated[Shaped[Tensor, "T E"], On(tp=R)]

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, 4).bfloat16())

        def forward(self, x: BFloat16[Tensor, "T E"]) -> Tensor:
            return x * self.w

    assert Loose()(of(torch.bfloat16)).dtype == torch.bfloat16
