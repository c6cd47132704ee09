"""Decided: on one axis what is accepted is sound, and what is refused is refuted."""

import pytest
from hypothesis import Phase, given, settings

from placements.inference.ops import OPS, ROWS
from placements.testing.cases import OpCall, call_names, calls
from placements.testing.laws.decided import SEVERAL_ROWS, STRICT, check_decided

# All names of a row share their flow, and every call is tried with up to 24 types: 92 rows
# and 40 calls of each are more than 30,000 decisions.
SHARE = 500

GENERATE = [Phase.generate]  # the first failure will do

CALLED = frozenset(call_names())
NAMES = [
    next(n for name in row.names.split() for n in (name, f"{name}_") if n in CALLED)
    for row in ROWS
    if not row.needs_memory  # with refused pieces torch would crash
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", dict.fromkeys([*NAMES, "fill_", "scatter_"]))
def test_types_are_accepted_or_refused_rightly(name: str) -> None:
    @settings(max_examples=max(settings().max_examples // SHARE, 5))
    @given(calls(name=name, sizes=SEVERAL_ROWS))
    def law(call: OpCall) -> None:
        check_decided(call)

    law()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STRICT)
def test_what_is_strict_on_purpose_is_strict(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("placements.testing.laws.decided.STRICT", {})

    @settings(max_examples=200, database=None, report_multiple_bugs=False, phases=GENERATE)
    @given(calls(name=name, sizes=SEVERAL_ROWS))
    def law(call: OpCall) -> None:
        check_decided(call)

    with pytest.raises(AssertionError, match="is refused, yet it is right"):
        law()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, like", [("neg", "exp"), ("exp", "neg")])
def test_the_law_finds_a_wrong_row(
    name: str, like: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from placements.checker.lookup import KNOWN

    monkeypatch.setitem(OPS, name, OPS[like])
    KNOWN.clear()

    @settings(max_examples=20, database=None, report_multiple_bugs=False, phases=GENERATE)
    @given(calls(name=name, sizes=SEVERAL_ROWS))
    def law(call: OpCall) -> None:
        check_decided(call)

    try:
        with pytest.raises(AssertionError, match=name):
            law()
    finally:
        KNOWN.clear()
