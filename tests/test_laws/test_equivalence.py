"""assert_spmd_equivalent on functions and modules, right and wrong."""

from typing import Annotated

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn

from placements import I, On, P, R, S, all_reduce, convert, declare, reinterpret, typed
from placements.testing import assert_spmd_equivalent


@typed
def project(
    x_TD: Annotated[Float[Tensor, "T D"], On(tp=R)],
    w_DF: Annotated[Float[Tensor, "D F"], On(tp=S(1))],
    v_FD: Annotated[Float[Tensor, "F D"], On(tp=S(0))],
) -> Annotated[Float[Tensor, "T D"], On(tp=R)]:
    return all_reduce((x_TD @ w_DF).relu() @ v_FD, "tp", src=P, dst=R)


def reference_project(x_TD: Tensor, w_DF: Tensor, v_FD: Tensor) -> Tensor:
    return (x_TD @ w_DF).relu() @ v_FD


def test_a_megatron_pair_equals_one_device() -> None:
    assert_spmd_equivalent(project, reference_project)


@typed
def scaled(
    x_TD: Annotated[Float[Tensor, "T D"], On(tp="t")],
    y_TD: Annotated[Float[Tensor, "T D"], On(tp="t")],
) -> Annotated[Float[Tensor, "T D"], On(tp="t")]:
    return x_TD + y_TD


def test_variables_are_drawn() -> None:
    assert_spmd_equivalent(scaled, lambda x_TD, y_TD: x_TD + y_TD)


@typed
def counted_per_rank(
    x_T: Annotated[Float[Tensor, " T"], On(tp=R)],
) -> Annotated[Float[Tensor, " T"], On(tp=P)]:
    return reinterpret(x_T, "tp", src=R, dst=P)


def test_a_wrong_function_is_shown_as_code() -> None:
    with pytest.raises(AssertionError) as failure:
        assert_spmd_equivalent(counted_per_rank, lambda x_T: x_T)
    text = str(failure.value)
    assert "check_spmd_case(counted_per_rank" in text and "mesh={'tp': 2}" in text


def test_a_function_that_is_always_refused_shows_nothing() -> None:
    @typed
    def refused(x_T: Annotated[Float[Tensor, " T"], On(tp=P)]) -> Tensor:
        return x_T.exp()

    with pytest.raises(AssertionError, match="refused all"):
        assert_spmd_equivalent(
            refused, lambda x_T: x_T.exp(), sizes={"T": [2]}, max_ranks=2
        )


class Column(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w_DF = nn.Parameter(torch.arange(12.0, dtype=torch.float64).reshape(3, 4))

    @typed
    def forward(
        self, x_TD: Annotated[Float[Tensor, "T 3"], On(tp=I)]
    ) -> Annotated[Float[Tensor, "T F"], On(tp=S(1))]:
        return convert(x_TD, "tp", src=I, dst=R) @ self.w_DF


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w_DF = nn.Parameter(torch.arange(12.0, dtype=torch.float64).reshape(3, 4))

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD @ self.w_DF


def test_a_module_and_its_parameters() -> None:
    column = Column()
    declare(column, {"w_DF": {"tp": S(1)}})
    assert_spmd_equivalent(column, Plain(), max_ranks=2)


def test_a_function_without_annotations_is_refused() -> None:
    with pytest.raises(ValueError, match="no annotated tensor argument"):
        assert_spmd_equivalent(torch.exp, torch.exp)
