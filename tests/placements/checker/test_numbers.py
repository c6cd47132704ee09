"""Python numbers that belong to an axis: what they are, what ops make of them."""

import copy
import json
import logging
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

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
    unchecked,
)
from placements.inference.numbers import NOTHING, Facts, RankInt, facts_of
from placements.runtime.forgotten import forget_questions, questions
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


@pytest.mark.parametrize(("shape", "dim"), [((), 0), ((2, 3), 2), ((2, 3), -3)])
def test_the_size_of_a_dim_that_is_not_there(shape: tuple[int, ...], dim: int) -> None:
    with set_current_mesh({"dp": 2}), typecheck():
        x = assert_type(torch.ones(shape), {"dp": R})
        with pytest.raises(IndexError, match=f"dim {dim} of a tensor of shape"):
            global_size(x, dim)


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


def test_a_size_counted_from_the_end_is_that_of_its_own_tensor() -> None:
    """Tensors of other numbers of dims share a type and a size, and not the dim at -1."""
    with set_current_mesh({"tp": 2}), typecheck():
        cube = assert_type(torch.ones(2, 2, 2), {"tp": S(0)})
        rows = assert_type(torch.ones(2), {"tp": S(0)})
        for _ in range(2):
            assert facts_of(cube.size(-1)) == NOTHING
            assert facts_of(rows.size(-1)).letters == (("tp", "P"),)
            assert facts_of(cube.size(-3)).letters == (("tp", "P"),)


def test_rows_up_to_the_size_of_a_piece_are_the_ranks_own() -> None:
    def program() -> Any:
        tp = device_mesh().get_local_rank("tp")
        piece = assert_type(torch.ones(3 - tp), {"dp": R, "tp": S(0, Padded(5))})
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


# What Python and numpy make of a size of a piece that is Partial on dp: its letter after.
KEPT: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "np.prod": (lambda x: np.prod(x.shape), "P"),
    "np.sum": (lambda x: np.sum(x.shape), "V"),
    "np.mean": (lambda x: np.mean(x.shape), "V"),
    "np.sqrt": (lambda x: np.sqrt(x.shape[0]), "V"),
    "np.log2": (lambda x: np.log2(x.shape[0]), "V"),
    "np.add": (lambda x: np.add(x.shape[0], 2), "V"),
    "np.maximum": (lambda x: np.maximum(x.shape[0], 2), "V"),
    "pow with a modulus": (lambda x: pow(x.shape[0], 2, 7), "V"),
    "its inverse": (lambda x: pow(x.shape[0] * 0 + 3, -1, 7), "V"),
    "np.divmod": (lambda x: np.divmod(x.shape[0], 2)[0], "V"),
    "a scalar of numpy on the left": (lambda x: np.float32(2) * x.shape[0], "V"),
    "an integer of numpy on the left": (lambda x: np.int64(2) - x.shape[0], "V"),
    "a scalar of numpy on the right": (lambda x: x.shape[0] / np.float64(2), "P"),
    "an array of sizes": (lambda x: np.array(x.shape)[0], "P"),
    "arithmetic of such an array": (lambda x: (np.asarray(x.shape) * 2)[0], "P"),
    "math.floor": (lambda x: math.floor(x.shape[0] / 2), "V"),
    "math.prod": (lambda x: math.prod(x.shape), "P"),
    "math.sqrt": (lambda x: math.sqrt(x.shape[0]), "V"),
    "math.log of a float": (lambda x: math.log(x.shape[0] / 2), "V"),
    "one over a root": (lambda x: 1.0 / math.sqrt(x.shape[0]), "V"),
    "a float of its own": (lambda x: 1.0 / (x.shape[0] * 1.0), "V"),
    "one over": (lambda x: 1 / x.shape[0], "V"),
}


@pytest.mark.parametrize("name", KEPT)
def test_numpy_keeps_the_axes_of_a_number(name: str) -> None:
    line, letter = KEPT[name]
    with set_current_mesh({"dp": 2}), typecheck():
        x = assert_type(torch.ones(4, 3), {"dp": S(0)})
        plain = torch.ones(4, 3)
        found = line(x)
        assert facts_of(found).letter("dp") == letter
    assert float(found) == float(line(plain))


# Where a plain answer is given, and what it was about.
ASKED: dict[str, tuple[Callable[[int], Any], str]] = {
    "==": (lambda n: n == 0, "n == 0"),
    "a float": (lambda n: n < 2.5, "n < 2.5"),
    "on the right": (lambda n: 0 <= n, "0 <= n"),
    "bool()": (lambda n: bool(n), "bool(n)"),
    "not": (lambda n: not n, "not n"),
    "or": (lambda n: n or 3, "n or 3"),
    "if": (lambda n: 1 if n else 2, "1 if n else 2"),
    "hash()": (lambda n: hash(n), "hash(n)"),
    "a key": (lambda n: {0: 1, 1: 2}[n], "{0: 1, 1: 2}[n]"),
    "in": (lambda n: n in (5, 6), "n in (5, 6)"),
    "an array": (lambda n: np.ones(2) * n, "np.ones(2) * n"),
    "np.equal": (lambda n: np.equal(n, 0), "np.equal(n, 0)"),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_plain_answer_is_noted(name: str) -> None:
    line, text = ASKED[name]
    with set_current_mesh({"dp": 2}), typecheck():
        forget_questions()
        found = line(axis_rank("dp"))
        (asked,) = dict.fromkeys((q.text, q.axes, q.number) for q in questions())
    assert facts_of(found) == NOTHING
    assert asked == (text, ("dp",), "axis_rank('dp')")


# What would be computed with as if it were equal on all ranks.
MADE_PLAIN: dict[str, tuple[Callable[[int], Any], str]] = {
    "int()": (lambda n: int(n), "int(n)"),
    "int() of a float": (lambda n: int(n * 0.5), "int(n * 0.5)"),
    "float()": (lambda n: float(n), "float(n)"),
    "complex()": (lambda n: complex(n), "complex(n)"),
    "np.int64": (lambda n: np.int64(n), "np.int64(n)"),
    "np.float32": (lambda n: np.float32(n), "np.float32(n)"),
    "np.asarray": (lambda n: np.asarray(n), "np.asarray(n)"),
    "np.prod of a tuple": (lambda n: np.prod((n, 2)), "np.prod((n, 2))"),
}


@pytest.mark.parametrize("name", MADE_PLAIN)
def test_a_number_of_an_axis_is_not_made_plain(name: str) -> None:
    line, text = MADE_PLAIN[name]
    with set_current_mesh({"dp": 2}), typecheck():
        x = assert_type(torch.ones(4, 3), {"dp": S(0)})
        with pytest.raises(PlacementError, match="makes a plain number of") as raised:
            line(axis_rank("dp"))
        assert text in str(raised.value) and raised.value.axis == "dp"
        with pytest.raises(PlacementError, match="global_size"):
            line(x.shape[0])
        n = x.shape[0]
        with unchecked():
            assert facts_of(line(n)) == NOTHING
    line(x.shape[0])


TEXT, BYTES = "%.1f", b"%d"
TEXTS: dict[str, Callable[[Any], Any]] = {
    "f-string": lambda n: f"{n:.1f} {n} {n:>3}",
    "%": lambda n: "%.1f" % n,  # noqa: UP031
    "% of a variable": lambda n: TEXT % n,
    "% of a float": lambda n: "%d rows" % (n / 2),  # noqa: UP031
    "% of a tuple": lambda n: (TEXT + " %s") % (n, n),
    "% of bytes": lambda n: BYTES % (n / 2),
    "format": lambda n: "{:.1f} {}".format(n, n),  # noqa: UP032
    "format_map": lambda n: "{n:.1f}".format_map({"n": n}),
    "format of a number": lambda n: format(n, ".1f"),
    "str": lambda n: str(n) + repr(n),
    "json": lambda n: json.dumps({"rows": n, "mean": n / 3}),
    "log": lambda n: logging.LogRecord("", 0, "", 0, "%d %.1f", (n / 2, n), None).getMessage(),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_may_be_made_of_a_number_of_an_axis(name: str) -> None:
    forget_questions()
    with set_current_mesh({"dp": 2}), typecheck():
        n = assert_type(torch.ones(4, 3), {"dp": S(0)}).shape[0]
        assert facts_of(n).letter("dp") == "P"
        assert TEXTS[name](n) == TEXTS[name](4)
    assert not questions()


# What a function of `math` takes: as many numbers, or a sequence of them.
GIVEN: tuple[Callable[[Any], tuple[Any, ...]], ...] = (
    lambda n: (n,), lambda n: (n, 1), lambda n: (2.0, n), lambda n: ([n, 2.0],),
    lambda n: ((n,), (1.0,)), lambda n: (iter([n, 2.0]),),
)  # fmt: skip


def test_functions_of_math_keep_the_axes_of_a_number_or_tell_of_it() -> None:
    """All that Python has, and every way to call them: none gives a plain number."""
    kept: set[str] = set()
    for name in [name for name, f in vars(math).items() if callable(f) and name[0] != "_"]:
        for ways in GIVEN:
            try:
                expected = getattr(math, name)(*ways(3))
            except (TypeError, ValueError, ArithmeticError):
                continue  # it takes no such arguments
            for times in (1, 1.0):
                with set_current_mesh({"dp": 2}), typecheck():
                    forget_questions()
                    n = assert_type(torch.ones(3), {"dp": S(0)}).shape[0] * times
                    try:
                        found = getattr(math, name)(*ways(n))
                    except TypeError:
                        assert times == 1.0  # math.gcd takes no float
                        continue
                    parts = found if isinstance(found, tuple) else (found,)
                    own = [one for one in parts if facts_of(one).letter("dp") in ("P", "V")]
                    assert len(own) == len(parts) or len(questions()) == 1, name
                    assert found == expected, name
                    kept.add(name)
    assert len(kept) > 50


def test_how_far_initial_values_spread_is_not_read_from_a_piece() -> None:
    """torch computes it from the sizes of the tensor: of a piece, it would be another."""
    fill: list[Any] = [
        nn.init.kaiming_uniform_,
        nn.init.xavier_uniform_,
        nn.init.xavier_normal_,
    ]
    with set_current_mesh({"tp": 2}), typecheck():
        for init in fill:
            w = assert_type(torch.empty(6, 4), {"tp": S(1)})
            with pytest.raises(PlacementError, match=r"shape\[1\]"):
                init(w)
        w = assert_type(torch.empty(6, 4), {"tp": S(0)})
        assert type_of(nn.init.kaiming_uniform_(w)) == {"tp": S(0)}
        assert type_of(nn.init.normal_(w, std=0.02)) == {"tp": S(0)}
        with pytest.raises(PlacementError, match=r"shape\[0\]"):
            nn.init.kaiming_uniform_(w, mode="fan_out")


def test_torch_asks_a_number_nothing() -> None:
    """So what is noted is always a question of the program."""
    with set_current_mesh({"dp": 2}), typecheck():
        forget_questions()
        n, x = axis_rank("dp") + 2, assert_type(torch.ones(4, 4), {"dp": R})
        for _ in range(2):
            x * n, x[n - 2], x[: n - 1], x.narrow(0, n - 2, 1), x.chunk(2)[n - 2]
            x.roll(n, 0), torch.full((2,), n), torch.zeros(n), torch.arange(n), x**n
            (
                torch.zeros(2).fill_(n),
                torch.tensor(n),
                x.new_zeros(n, 2),
                x.masked_fill(x > 0, n),
            )
        torch.manual_seed(n)
        assert not questions()


def test_a_number_asks_nobody_after_its_block() -> None:
    with set_current_mesh({"dp": 2}), typecheck():
        forget_questions()
        n = axis_rank("dp")
    assert n == 0 and not questions()


# Numbers about memory -> on which axes they are each rank's own; x is cut on dp.
LAYOUT: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "the stride over rows": (lambda x: x.stride(0), "R"),
    "the stride below rows": (lambda x: x.stride(1), "V"),
    "all strides": (lambda x: x.stride()[0], "R"),
    "strides of the transpose": (lambda x: x.T.contiguous().stride(0), "V"),
    "by keyword": (lambda x: x.T.contiguous().stride(dim=-2), "V"),
    "an offset": (lambda x: x[:, 1:].storage_offset(), "V"),
    "nbytes": (lambda x: x.nbytes, "P"),
    "the bytes of the memory": (lambda x: x.untyped_storage().nbytes(), "V"),
    "the size of the memory": (lambda x: x.untyped_storage().size(), "V"),
    "the size of an element": (lambda x: x.element_size(), "R"),
}


@pytest.mark.parametrize("name", LAYOUT)
def test_numbers_about_memory_know_their_axes(name: str) -> None:
    line, letter = LAYOUT[name]
    with set_current_mesh({"dp": 2}), typecheck():
        x = assert_type(torch.ones(4, 3), {"dp": S(0)})
        assert facts_of(line(x)).letter("dp") == letter
        whole = assert_type(torch.ones(4, 3), {"dp": R})
        assert facts_of(line(whole)) == NOTHING
        own = assert_type(torch.ones(4, 3), {"dp": V})
        expected = "R" if name == "the size of an element" else "V"
        assert facts_of(line(own)).letter("dp") == expected


def test_a_sum_is_not_divided_by_the_bytes_of_a_piece() -> None:
    with set_current_mesh({"dp": 2}), typecheck():
        x = assert_type(torch.ones(4, 3), {"dp": S(0)})
        for line in (
            lambda: x.sum() / x.nbytes,
            lambda: x.sum() / x.untyped_storage().nbytes(),
            lambda: x.sum() / x.untyped_storage().size(),
            lambda: x.sum() / x.T.contiguous().stride(0),
        ):
            with pytest.raises(PlacementError):
                line()
    assert x.untyped_storage().nbytes() == 48


def test_a_bool_that_is_read_from_a_tensor_is_noted() -> None:
    with set_current_mesh({"dp": 2}), typecheck():
        v = assert_type(torch.ones(3), {"dp": V})
        r = assert_type(torch.ones(3), {"dp": R})
        forget_questions()
        assert bool((r.sum() > 0).item()) and torch.equal(r, r)
        assert not questions()
        if v.sum() > 2:
            same = torch.equal(input=v, other=r)
        assert same
        first, second = questions()
    assert first.text == "v.sum() > 2" or first.text.startswith("if v.sum() > 2")
    assert second.text == "torch.equal(input=v, other=r)" and second.axes == ("dp",)


def test_the_last_dim_of_a_tensor_is_not_that_of_another() -> None:
    with set_current_mesh({"dp": 2}), typecheck():
        flat = assert_type(torch.ones(2), {"dp": S(0)})
        rows = assert_type(torch.ones(2, 2), {"dp": S(0)})
        for _ in range(2):
            assert facts_of(flat.size(-1)).letter("dp") == "P"
            assert facts_of(rows.size(-1)) is NOTHING
