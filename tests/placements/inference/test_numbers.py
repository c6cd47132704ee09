"""Numbers that belong to axes: what Python's functions and methods make of them."""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from placements import (
    Padded,
    PlacementError,
    S,
    assert_type,
    axis_rank,
    set_current_mesh,
    type_of,
    typecheck,
)
from placements.inference.numbers import NOTHING, Facts, belonging, facts_of
from placements.testing import device_mesh, run_ranks

# Methods of int and float that take no argument -> the letter of the result for a Partial.
LETTERS = {
    "__pos__": "P", "__neg__": "P", "real": "P", "numerator": "P", "conjugate": "P",
    "__index__": "P", "__abs__": "V", "__ceil__": "V", "__floor__": "V", "__invert__": "V",
    "__round__": "V", "__trunc__": "V", "as_integer_ratio": "V", "bit_count": "V",
    "bit_length": "V",
}  # fmt: skip
# Methods of int and float that take another number, here the same one.
OF_TWO = {
    "__add__": "P", "__radd__": "P", "__sub__": "P", "__rsub__": "P", "__mul__": "V",
    "__rmul__": "V", "__truediv__": "V", "__rtruediv__": "V", "__floordiv__": "V",
    "__rfloordiv__": "V", "__mod__": "V", "__rmod__": "V", "__divmod__": "V",
    "__rdivmod__": "V", "__pow__": "V", "__rpow__": "V", "__and__": "V", "__rand__": "V",
    "__or__": "V", "__ror__": "V", "__xor__": "V", "__rxor__": "V", "__lshift__": "V",
    "__rlshift__": "V", "__rshift__": "V", "__rrshift__": "V",
}  # fmt: skip
# What gives the axes up, and why that is right or how it is answered.
GIVEN_UP = {
    "imag": "zero on all ranks",
    "denominator": "one on all ranks",
    "is_integer": "of an int always true, of a float noted",
    "to_bytes": "noted",
    "hex": "noted",
    "__bool__": "noted",
    "__hash__": "noted",
    "__int__": "noted",
    "__float__": "noted",
    **dict.fromkeys(("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"), "noted"),
    **dict.fromkeys(("__format__", "__str__", "__repr__"), "a text"),
    **dict.fromkeys(("__getnewargs__", "__reduce__", "__reduce_ex__"), "for pickles"),
    **dict.fromkeys(("from_bytes", "fromhex", "__getformat__"), "reads no number"),
}
OF_EVERY_OBJECT = set(dir(object)) - {*GIVEN_UP}


@pytest.mark.parametrize("plain", [6, 6.5])
def test_every_method_keeps_the_axes_or_is_listed(plain: float) -> None:
    number = belonging(plain, Facts((("tp", "P"),), "n"))
    for name in sorted(set(dir(type(plain))) - OF_EVERY_OBJECT):
        if name in GIVEN_UP:
            continue
        found, usual = getattr(number, name), getattr(plain, name)
        if name in OF_TWO:
            found, usual = found(number), usual(plain)
        elif callable(found):
            found, usual = found(), usual()
        assert found == usual
        letter = OF_TWO.get(name) or LETTERS[name]
        for one in found if isinstance(found, tuple) else (found,):
            assert facts_of(one).letter("tp") == letter, name


CHOSEN: dict[str, Callable[[Tensor, int], Any]] = {
    "max": lambda x, rank: max(x.shape[0], 3),
    "min, on the right": lambda x, rank: min(3, x.shape[0]),
    "of a list": lambda x, rank: max([1, 2, x.shape[0]]),
    "of a generator": lambda x, rank: max(n for n in (1, 2, x.shape[0])),
    "of a shape": lambda x, rank: max(x.shape),
    "starred": lambda x, rank: max(*x.shape),
    "of two summands": lambda x, rank: max(x.shape[0], x.shape[0] * 2),
    "of a rank and a size": lambda x, rank: min(rank, x.shape[0]),
    "of a float and a rank": lambda x, rank: max(0.5, rank),
    "of a rank and a float": lambda x, rank: max(rank, 0.5),
    "of a bool and a rank": lambda x, rank: max(True, rank),
    "in code without a file": lambda x, rank: eval("max(n, 3)", {"n": x.shape[0]}),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_what_python_chooses_belongs_to_the_axes_of_all(name: str) -> None:
    with set_current_mesh({"dp": 2}), typecheck():
        x = assert_type(torch.ones(4, 3), {"dp": S(0)})
        found = CHOSEN[name](x, axis_rank("dp"))
        assert facts_of(found).letters == (("dp", "V"),)
    assert CHOSEN[name](torch.ones(4, 3), 0) == found


NOT_CHOSEN: dict[str, Callable[[Tensor, int], Any]] = {
    "sorted": lambda x, rank: sorted([rank, 1])[0],
    "np.max": lambda x, rank: np.max(x.shape),
    "by a key": lambda x, rank: max(rank, 1, key=lambda n: n),
}


@pytest.mark.parametrize("name", NOT_CHOSEN)
def test_python_does_not_choose_between_numbers_of_different_axes(name: str) -> None:
    with set_current_mesh({"dp": 2}), typecheck():
        x = assert_type(torch.ones(4, 3), {"dp": S(0)})
        with pytest.raises(PlacementError, match="chooses between") as refused:
            NOT_CHOSEN[name](x, axis_rank("dp"))
        assert "np.maximum" in str(refused.value)


def test_python_chooses_between_numbers_of_the_same_kind() -> None:
    with set_current_mesh({"dp": 2}), typecheck():
        x = assert_type(torch.ones(4, 3), {"dp": S(0)})
        y = assert_type(torch.ones(4, 5), {"dp": S(0)})
        rank = axis_rank("dp")
        assert type_of(torch.zeros(max(x.shape[0], y.shape[0]))) == {"dp": S(0)}
        assert facts_of(max(rank, 2 * rank)).letter("dp") == "V"
        assert max(x.shape[1], 7) == 7 and facts_of(max(x.shape[1], 2)) is NOTHING
        assert x.shape[0] > 3 and not x.shape[0] < 1  # branches, which are noted


def guarded() -> str:
    with set_current_mesh(device_mesh()), typecheck():
        rows = 1 - torch.distributed.get_rank()
        x = assert_type(torch.ones(rows, 3), {"dp": S(0, Padded(1))})
        y = assert_type(torch.ones(2), {"dp": S(0)})
        with pytest.raises(PlacementError):
            _ = y.sum() / max(x.shape[0], 1)
        return str(type_of(y / max(x.shape[0], 1)))


def test_ranks_with_and_without_rows_say_the_same() -> None:
    assert run_ranks({"dp": 2}, guarded) == ["{dp:V}", "{dp:V}"]


def test_shapes_that_are_put_together_keep_the_axes() -> None:
    with set_current_mesh({"dp": 2}), typecheck():
        x = assert_type(torch.ones(4, 3), {"dp": S(0)})
        joined: list[Any] = [x.shape + torch.Size([1]), tuple([1]) + x.shape, x.shape[:1]]
        for sizes in joined:
            assert facts_of(sizes.numel()).letter("dp") == "P"
        assert facts_of(torch.broadcast_shapes(x.shape, (1,)).numel()).letter("dp") == "P"


def test_the_quotient_of_a_size_is_a_size_where_nothing_is_left_over() -> None:
    with set_current_mesh({"dp": 2}), typecheck():
        x = assert_type(torch.ones(12, 3), {"dp": S(0)})
        rows: Any = x.shape[0] // 4
        assert rows == 3 and facts_of(rows).letter("dp") == "P"
        assert type_of(torch.zeros(rows)) == {"dp": S(0)}
        assert type_of(x.view(rows, 4, 3)) == {"dp": S(0)}
        for other in (x.shape[0] // 5, 5 // x.shape[0], x.shape[0] // x.shape[0]):
            assert facts_of(other).letter("dp") == "V"


def test_uneven_pieces_are_not_divided() -> None:
    with set_current_mesh({"dp": 2}), typecheck():
        x = assert_type(torch.ones(4, 3), {"dp": S(0, Padded(7))})
        assert facts_of(x.shape[0] // 2).letter("dp") == "V"


@pytest.mark.parametrize("plain", [6, 6.5])
def test_the_class_of_a_number_makes_plain_numbers(plain: float) -> None:
    """`statistics` calls the class of the numbers that it was given with a result."""
    number = belonging(plain, Facts((("a", "P"),), "n"))
    for made in (type(number)(plain), type(number)(number), type(number)(str(plain))):
        assert made == plain and type(made) is type(plain)
    assert type(number)() == 0
    assert statistics.mean([number]) == plain and statistics.mean([number, plain]) == plain
