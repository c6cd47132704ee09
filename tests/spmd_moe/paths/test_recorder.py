"""Who hears that a fast path ran, and what is printed."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from spmd_moe.paths.recorder import (
    Recorder,
    is_switched_on,
    ran,
    recording,
    reporting_rank,
)

PROGRAM = """
from spmd_moe.paths.recorder import ran
for name, amount in {calls}: ran(name, amount)
"""


@pytest.mark.parametrize("value", ["1", "true", "yes", "rank0", "all", "TRUE", "Rank0"])
def test_the_switch_is_on(value: str) -> None:
    assert is_switched_on({"SPMD_MOE_FAST_PATHS": value})


@pytest.mark.parametrize("value", ["", "0", "no", "false", "2", "rank1"])
def test_the_switch_is_off(value: str) -> None:
    assert not is_switched_on({"SPMD_MOE_FAST_PATHS": value})
    assert not is_switched_on({})


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, "0"),
        ({"RANK": "0"}, "0"),
        ({"RANK": "1"}, None),
        ({"RANK": "", "PMI_RANK": "2"}, None),
        ({"PALS_RANKID": "0", "OMPI_COMM_WORLD_RANK": "3"}, "0"),
        ({"OMPI_COMM_WORLD_RANK": "3", "SPMD_MOE_FAST_PATHS": "ALL"}, "3"),
    ],
)
def test_rank_0_reports_or_all(environment: dict[str, str], rank: str | None) -> None:
    assert reporting_rank(environment) == rank


def printed(calls: list[tuple[str, int]], **environment: str) -> str:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(calls=calls)],
        env={**os.environ, **environment}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return found.stderr


def test_a_process_reports_once_when_it_ends() -> None:
    calls = [("b", 1), ("a", 2), ("b", 1)]
    assert (
        printed(calls, SPMD_MOE_FAST_PATHS="1") == "[rank0] SPMD_MOE_FAST_PATHS a=2 b=2\n"
    )
    assert printed(calls, SPMD_MOE_FAST_PATHS="1", RANK="1") == ""
    assert printed(calls, SPMD_MOE_FAST_PATHS="0") == ""


def test_an_empty_recorder_says_so() -> None:
    assert Recorder().line("3") == "[rank3] SPMD_MOE_FAST_PATHS empty"


def test_blocks_listen_from_the_innermost_out_and_threads_apart() -> None:
    ran("nobody listens")
    with recording() as outer:
        ran("one")
        with recording() as inner:
            ran("two", 5)
            ran("two", 3)
        thread = threading.Thread(target=ran, args=("elsewhere",))
        thread.start()
        thread.join()
    assert outer.counts() == {"one": 1} and inner.counts() == {"two": 8}
    seen = inner.amounts["two"]
    assert (seen.times, seen.total, seen.least, seen.most) == (2, 8, 3, 5)
    inner.clear()
    assert inner.counts() == {}


def test_nothing_is_counted_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with recording() as recorder:
        ran("compiled")
    assert recorder.counts() == {}
