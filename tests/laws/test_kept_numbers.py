"""One number, given a shape and moved about, goes with any type still."""

import pytest
from hypothesis import given, settings

from placements.testing.cases import OpCall, calls
from placements.testing.laws.kept_numbers import KEEP_NUMBERS, is_kept

SHARE = len(KEEP_NUMBERS)


def check_some_kept(name: str, options: settings) -> None:
    """Some call of the op keeps a number; what is called one always is."""
    kept: list[bool] = []

    def law(call: OpCall) -> None:
        kept.append(is_kept(call) is True)

    options(given(calls(name=name))(law))()
    assert any(kept), f"{name}: a number given a shape becomes Replicate"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(KEEP_NUMBERS))
def test_a_number_is_kept(name: str) -> None:
    check_some_kept(name, settings(max_examples=max(settings().max_examples // SHARE, 20)))
