"""Which rank failed first and by itself, and what it told; ports."""

import json
import time
from pathlib import Path

import pytest

from spmd_moe.training import launch
from spmd_moe.training.errors import LossesDiffer, RankFailed, RunError, Unusable
from spmd_moe.training.meeting import HOST, check_port, listening

LOST = launch.message_of(
    RuntimeError(
        "[/a/gloo/tcp/pair.cc:5] Connection closed by peer [127.0.0.1]:9. Typically"
    )
)


# A program for ranks, which imports nothing that takes time.
RANK = f"""
import json, os, signal, time
rank = int(os.environ["RANK"])
def fails(kind, message):
    with open(os.environ["{launch.REPORT}"], "w") as file:
        json.dump({{"kind": kind, "message": message}}, file)
    os._exit(1)
"""
LOSES = f"fails('RuntimeError', {LOST!r})"
WAITS = "time.sleep(60)"


def launched(*ranks: str, timeout: float = 30.0) -> RunError | None:
    """Run a program on each rank; what the launcher raises."""
    choices = "".join(f"if rank == {k}: {does}\n" for k, does in enumerate(ranks))
    try:
        launch.launch(RANK + choices, [], len(ranks), None, timeout)
    except RunError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([LOSES, "time.sleep(0.5); os.kill(os.getpid(), 9)"], "was killed by SIGKILL"),
        ([LOSES, "time.sleep(0.5); fails('ValueError', 'bad')"], "failed, the other ranks were stopped: bad"),
        ([LOSES, "os.kill(os.getpid(), signal.SIGSTOP)"], "is stopped (SIGSTOP or the like)"),
        ([WAITS, "os._exit(3)"], "failed, the other ranks were stopped: exit code 3"),
        (["os.abort()", "time.sleep(0.5); os.kill(os.getpid(), 9)"], "was killed by SIGKILL"),
    ],
)  # fmt: skip
def test_the_first_cause_is_told(ranks: list[str], said: str) -> None:
    found = launched(*ranks)
    assert isinstance(found, RankFailed)
    assert str(found).startswith("rank 1 (pid ") and said in str(found)


def test_ranks_that_only_lost_a_connection_are_told_after_a_while() -> None:
    assert LOST in str(launched(LOSES, WAITS))


def test_a_rank_that_is_stopped_is_waited_for_no_longer_than_the_timeout() -> None:
    began = time.monotonic()
    found = launched(WAITS, "os.kill(os.getpid(), signal.SIGSTOP)", timeout=2.0)
    assert time.monotonic() - began < 50
    assert "did not answer within 2 s (--timeout)" in str(found)


@pytest.mark.parametrize("kind", [Unusable, LossesDiffer])
def test_what_concerns_the_run_is_told_as_it_is(kind: type[RunError]) -> None:
    found = launched(f"fails({kind.__name__!r}, 'what to do')")
    assert type(found) is kind and str(found) == "what to do"


def test_signals_reach_ranks_when_they_can_heed_them() -> None:
    """SIGTERM does not end a rank that is not ready, and Ctrl-C is for the launcher."""
    found = launched("os.kill(os.getpid(), 15); os.kill(os.getpid(), 2); os._exit(0)")
    assert found is None


def test_a_lost_connection_is_told_in_one_line() -> None:
    assert LOST.endswith("does not answer: Connection closed by peer [127.0.0.1]:9")
    assert launch.message_of(ValueError("no gloo")) == "ValueError: no gloo"


def test_a_rank_reports_all_of_its_error_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "0"
    monkeypatch.setenv(launch.REPORT, str(file))
    launch.report(ValueError("too many\nlines"))
    assert json.loads(file.read_text())["message"] == "ValueError: too many\nlines"
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_a_port_that_is_taken_is_refused() -> None:
    with listening(HOST, 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unusable, match="cannot be used"):
            check_port(port)
        with pytest.raises(Unusable, match="can be had for the processes to meet"):
            launch.launch("", [], 1, port, 5.0)
    check_port(port)
