"""Sound: every op of the table, in place or not, computes the single-device result."""

import pytest
from hypothesis import given, settings

from placements.ops import OPS, ROWS
from placements.testing.cases import CASES, NOT_CALLED, call_names
from placements.testing.laws.comparison import Tally
from placements.testing.laws.placed_calls import PlacedCall, placed_calls
from placements.testing.laws.sound import (
    check_forgetting,
    check_sound,
    require_accepted,
)

# Names share their flow with the others of their row, so the examples of a profile are
# spread over the names.
SHARE = 10


def test_every_op_has_a_case() -> None:
    # Of the table's own rows: other packages may have registered ops of theirs.
    names = {name for row in ROWS for name in row.names.split()}
    assert names - set(CASES) - set(NOT_CALLED) == set()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", call_names())
def test_accepted_calls_equal_one_device(name: str) -> None:
    tally = Tally()
    count = max(settings().max_examples // SHARE, 40)

    def law(placed: PlacedCall) -> None:
        if check_sound(placed, tally):
            check_forgetting(placed)

    # Ops of many operands are refused more often, so they may need more examples.
    for examples in (count, 5 * count):
        settings(max_examples=examples)(given(placed_calls(name=name))(law))()
        if tally.letters & set("SPR") or not tally.operands:
            break
    require_accepted(name, tally)


@pytest.mark.filterwarnings("ignore")
def test_the_law_finds_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A non-linear op called linear must not pass."""
    from placements.op_lookup import KNOWN

    monkeypatch.setitem(OPS, "exp", OPS["neg"])
    KNOWN.clear()

    @settings(max_examples=200, database=None)
    @given(placed_calls(name="exp"))
    def law(placed: PlacedCall) -> None:
        check_sound(placed)

    try:
        with pytest.raises(AssertionError, match="exp"):
            law()
    finally:
        KNOWN.clear()


def test_a_law_that_accepted_nothing_fails() -> None:
    with pytest.raises(AssertionError, match="no call was accepted"):
        require_accepted("exp", Tally(tried=50))
