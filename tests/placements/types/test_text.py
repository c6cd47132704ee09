"""Types as text: printed, parsed, and refused if they are no type."""

import pytest

from placements.types.axis import AxisType
from placements.types.text import parse_axis_type
from tests.support.axis_types import ALL


@pytest.mark.parametrize("t", ALL, ids=repr)
def test_printing_then_parsing_gives_the_type_back(t: AxisType) -> None:
    assert parse_axis_type(repr(t)) == t
    assert repr(parse_axis_type(repr(t))) == repr(t)


@pytest.mark.parametrize(
    "text", ["Q", "S", "S()", "S(0, Even)", "S(0, Padded(x))", "", "R I"]
)
def test_text_that_is_no_type_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a placement"):
        parse_axis_type(text)
