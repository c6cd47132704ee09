"""A few of the faults of `make test-faults`."""

import signal
import sys
from pathlib import Path

import pytest

from tests.faults.moments import LAUNCHER, Chain, Moment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds ranks in /proc")

SAMPLE = [
    Moment("write", signal.SIGKILL, "1", 0.01),
    Moment("start", signal.SIGKILL, LAUNCHER, 1.0),
    Moment("step", signal.SIGTERM, "0", 0.1),
    Moment("step", signal.SIGSTOP, "1", 0.1),
]


def test_a_sample_of_faults_and_the_resumes(tmp_path: Path) -> None:
    chain = Chain(tmp_path / "run", "dp=2,ep=2", 2)
    for moment in SAMPLE:
        chain.suffer(moment)
    chain.finish(tmp_path / "whole")
