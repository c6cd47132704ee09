"""Types as text: printed, parsed, and refused if they are no type."""

import pytest

from placements import P, S
from placements.types.axis import AxisType
from placements.types.text import parse_axis_type, parse_described, parse_types
from tests.support.axis_types import ALL


@pytest.mark.parametrize("t", ALL, ids=repr)
def test_printing_then_parsing_gives_the_type_back(t: AxisType) -> None:
    assert parse_axis_type(repr(t)) == t
    assert repr(parse_axis_type(repr(t))) == repr(t)


def test_described_tensors_round_trip() -> None:
    for text in (
        "f32[T=6, D=8]{dp:S(0), tp:P}",
        "bf16[2, 3, 4]{dp:S(0), tp:S(1, Folded(2, Padded(5)))}",
        "i64[]{tp:R}",
    ):
        assert str(parse_described(text)) == text
    assert parse_types("{dp:S(0), tp:P}") == {"dp": S(0), "tp": P}


@pytest.mark.parametrize(
    "text", ["Q", "S", "S()", "S(0, Even)", "S(0, Padded(x))", "", "R I"]
)
def test_text_that_is_no_type_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a placement"):
        parse_axis_type(text)


@pytest.mark.parametrize("text", ["f32(2){tp:R}", "f32[2]", "[2]{tp:R}", "f32[2]{tp R}"])
def test_text_that_is_no_tensor_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        parse_described(text)
