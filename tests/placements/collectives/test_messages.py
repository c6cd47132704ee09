"""What ranks send each other is data: a message can name no code."""

import os
import pickle
from collections import Counter
from typing import Any

import pytest

from placements import PlacementError
from placements.collectives.messages import dumps, loads
from placements.verification.logs import Claim, Event, Log, MeshKey


def test_records_and_errors_arrive_as_they_were() -> None:
    mesh = MeshKey((("tp", 2),), (0, 1))
    event = Event("value", "a.py:1", 0, "x", mesh, {"tp": Claim("S", 0, (2, 1), 2)})
    log = Log([event], ["w"], True)
    sent = {0: log, 1: (frozenset({"tp"}), Counter("ab"), 1.5, None, {"x": [b"y"]})}
    assert loads(dumps(sent)) == sent
    error = loads(dumps(PlacementError("said", axis="tp")))
    assert isinstance(error, PlacementError) and str(error) == "said"
    assert isinstance(loads(dumps(KeyError("k"))), KeyError)


class Calls:
    def __init__(self, called: Any, *args: Any) -> None:
        self.called, self.args = called, args

    def __reduce__(self) -> Any:
        return self.called, self.args


@pytest.mark.parametrize(
    "called", [os.system, eval, getattr, exec, open, dumps, loads, pickle.loads, Calls]
)
def test_code_is_refused(called: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match="is no record of this package"):
        loads(pickle.dumps(Calls(called, "1 / 0")))
