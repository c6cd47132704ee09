"""Python numbers that belong to an axis: what they are, what ops make of them."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from placements import (
    I,
    P,
    Padded,
    PlacementError,
    R,
    S,
    V,
    all_reduce,
    assert_type,
    axis_rank,
    global_mean,
    global_size,
    set_current_mesh,
    type_of,
    typecheck,
)
from placements.inference.numbers import Facts, RankInt, facts_of
from placements.testing import RankFailure, device_mesh, run_ranks

AXES = {"dp": 2, "tp": 2}


def on_ranks(program: Callable[[], Any]) -> Any:
    """What the first rank returns, checked on all of them."""

    def checked() -> Any:
        with set_current_mesh(device_mesh()), typecheck():
            return program()

    return run_ranks(AXES, checked)[0]


def refused(program: Callable[[], Any]) -> PlacementError:
    with pytest.raises(RankFailure) as failure:
        on_ranks(program)
    assert isinstance(failure.value.cause, PlacementError), failure.value
    return failure.value.cause


def x_of(**types: Any) -> Tensor:
    return assert_type(torch.ones(4, 3), {"dp": R, "tp": R, **types})


def rank_in_group() -> int:
    return dist.get_rank(device_mesh().get_group("tp"))


# Ways to choose by the rank on tp: all differ by rank on tp, and only there.
CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "chunk": lambda x: x.chunk(2)[axis_rank("tp")],
    "unbind": lambda x: x.unbind(0)[rank_in_group()],
    "slice": lambda x: x[axis_rank("tp") * 2 : (axis_rank("tp") + 1) * 2],
    "select": lambda x: x[rank_in_group()],
    "coordinate": lambda x: x[device_mesh().get_coordinate()[1]],
    "narrow": lambda x: x.narrow(0, device_mesh().get_local_rank("tp") * 2, 2),
    "times": lambda x: x * (axis_rank("tp") + 1),
    "roll": lambda x: x.roll(axis_rank("tp"), 0),
    "where": lambda x: torch.where(x > 0, x, axis_rank("tp")),
    "mask": lambda x: x.masked_fill(torch.arange(3) < axis_rank("tp"), 0),
}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_what_a_rank_chooses_varies_on_its_axis(choice: Callable[[Tensor], Tensor]) -> None:
    assert on_ranks(lambda: type_of(choice(x_of()))) == {"dp": R, "tp": V}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_an_invariant_is_not_chosen_by_rank(choice: Callable[[Tensor], Tensor]) -> None:
    assert refused(lambda: choice(x_of(tp=I))).axis == "tp"


def test_the_rank_of_the_world_belongs_to_every_axis() -> None:
    assert on_ranks(lambda: type_of(x_of() * dist.get_rank())) == {"dp": V, "tp": V}


def test_factories_take_the_type_of_their_number() -> None:
    def program() -> Any:
        counted = torch.full((2,), x_of(dp=S(0)).shape[0])
        assert all_reduce(counted, "dp", src=P, dst=R).tolist() == [8, 8]
        return [
            type_of(counted),
            type_of(torch.full((2,), axis_rank("tp"))),
            type_of(torch.arange(axis_rank("dp"), 5)),
            type_of(torch.zeros(x_of(dp=S(0)).shape[0])),
        ]

    assert on_ranks(program) == [
        {"dp": P, "tp": R}, {"dp": R, "tp": V}, {"dp": V, "tp": R}, {"dp": S(0), "tp": R},
    ]  # fmt: skip


MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "shape": lambda x: x.sum(0) / x.shape[0],
    "size": lambda x: x.sum(0) / x.size(0),
    "size of all": lambda x: x.sum() / x.numel(),
    "factor": lambda x: x.sum(0) * (1 / x.shape[0]),
    "in place": lambda x: x.sum(0).div_(x.shape[0]),
    "with a constant": lambda x: x.sum(0) / (x.shape[0] + 1),
}


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_a_sum_is_not_divided_by_the_size_of_a_piece(mean: Callable[..., Tensor]) -> None:
    error = refused(lambda: mean(x_of(dp=S(0))))
    assert error.axis == "dp"


def test_the_error_names_the_size_and_the_way_out() -> None:
    error = refused(lambda: MEANS["shape"](x_of(dp=S(0))))
    assert error.name == "shape[0]" and error.actual == "Partial"
    assert "global_size" in error.advice and not error.fixes
    assert "shape[0] = 4 {dp:P}" in error.operands


def test_means_over_all_ranks_are_accepted() -> None:
    def program() -> Any:
        x = x_of(dp=S(0))
        total = all_reduce(x.sum(0), "dp", src=P, dst=R)
        whole = total / global_size(x, 0)
        counted = torch.full((), x.shape[0])
        assert torch.equal(whole, torch.ones(3)) and global_size(x, 1) == 3
        return type_of(whole), type_of(global_mean(x.sum(0), counted, "dp", dst=R))

    assert on_ranks(program) == ({"dp": R, "tp": R}, {"dp": R, "tp": R})


def test_no_factor_makes_a_piece_the_whole() -> None:
    """A 2 that happens to be the size of the axis may mean anything."""

    def program() -> Any:
        x = x_of(dp=S(0))
        return all_reduce(x.sum(0), "dp", src=P, dst=I) / (x.shape[0] * 2)

    assert refused(program).axis == "dp"


def test_own_rows_are_divided_by_their_own_number() -> None:
    def program() -> Any:
        x = x_of(dp=V)
        return type_of(x.sum(0) / x.shape[0])

    assert on_ranks(program) == {"dp": V, "tp": R}


def test_sizes_serve_as_sizes() -> None:
    def program() -> Any:
        x = x_of(dp=S(0))
        rows, width = x.shape
        assert rows == 4 and isinstance(rows, int) and not facts_of(width).letters
        return [
            type_of(x.view(rows * width)),
            type_of(x.view(rows, 1, width)),
            type_of(x * width),
        ]

    assert on_ranks(program) == [{"dp": S(0), "tp": R}] * 3


def test_rows_up_to_the_size_of_a_piece_are_the_ranks_own() -> None:
    def program() -> Any:
        tp = device_mesh().get_local_rank("tp")
        piece = assert_type(torch.ones(3 - int(tp)), {"dp": R, "tp": S(0, Padded(5))})
        return type_of(x_of()[: piece.shape[0]]), type_of(x_of()[: x_of(dp=S(0)).shape[0]])

    assert on_ranks(program) == ({"dp": R, "tp": V}, {"dp": V, "tp": R})


def test_a_count_read_from_own_values_is_the_ranks_own() -> None:
    def program() -> Any:
        own = assert_type(torch.arange(3), {"dp": V, "tp": R})
        return type_of(x_of() * own.sum().item())

    assert on_ranks(program) == {"dp": V, "tp": R}


def test_with_checking_off_they_are_plain_numbers() -> None:
    def program() -> Any:
        with set_current_mesh(device_mesh()):
            return type(axis_rank("tp")), type(dist.get_rank())

    assert run_ranks(AXES, program) == [(int, int)] * 4


def test_copies_elsewhere_are_plain() -> None:
    size = RankInt(3, Facts((("tp", "P"),), "shape[0]"))
    assert type(pickle.loads(pickle.dumps(size))) is int
    assert facts_of(copy.deepcopy(size)) == size.facts
    assert f"{size}" == "3" and {3: "three"}[size] == "three"


@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=3),
    steps=st.lists(
        st.tuples(st.sampled_from("+-*/"), st.one_of(st.just("n"), st.integers(0, 3))),
        max_size=4,
    ),
)
def test_what_stays_partial_sums_to_the_same_of_the_sum(
    sizes: list[int], steps: list[tuple[str, Any]]
) -> None:
    """The meaning of the letter: the ranks' results add up to that of the total."""

    def result(size: Any) -> Any:
        value = size
        for sign, other in steps:
            by = size if other == "n" else other
            if sign == "/" and not by:
                continue
            value = eval(f"value {sign} by")
        return value

    results = [result(RankInt(n, Facts((("tp", "P"),), "n"))) for n in sizes]
    letters = {facts_of(r).letter("tp") for r in results}
    if letters == {"P"}:
        assert sum(map(float, results)) == pytest.approx(float(result(sum(sizes))))
