"""Which rank failed first and by itself, and what it told; ports."""

import json
import logging
import signal
import socket
from collections.abc import Generator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)

from spmd_moe.training import launch
from spmd_moe.training.errors import LossesDiffer, RankFailed, RunError, Unusable

LOST = launch.message_of(
    RuntimeError(
        "[/a/gloo/tcp/pair.cc:5] Connection closed by peer [127.0.0.1]:9. Typically"
    )
)


def failures(directory: Path, *ranks: tuple[int, str]) -> ChildFailedError:
    found: dict[int, ProcessFailure] = {}
    for rank, (exit_code, said) in enumerate(ranks):
        file = directory / f"{rank}.json"
        if said:
            content = {"message": said, "kind": "", "extraInfo": {"timestamp": "5"}}
            file.write_text(json.dumps({"message": content}))
        found[rank] = ProcessFailure(rank, 100 + rank, exit_code, str(file))
    return ChildFailedError("train", found)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([(1, LOST), (-9, ""), (-15, "")], "rank 1 (pid 101) was killed by SIGKILL"),
        ([(1, LOST), (1, "ValueError: bad"), (-15, "")], "rank 1 (pid 101) failed"),
        ([(-15, ""), (1, LOST)], "rank 1 (pid 101) failed"),
        ([(3, "")], "exit code 3"),
    ],
)
def test_the_first_cause_is_told(
    ranks: list[tuple[int, str]], said: str, tmp_path: Path
) -> None:
    found = launch.first_cause(failures(tmp_path, *ranks))
    assert isinstance(found, RankFailed) and said in str(found)


def test_a_lost_connection_is_told_in_one_line() -> None:
    assert LOST.endswith("does not answer: Connection closed by peer [127.0.0.1]:9")
    assert launch.message_of(ValueError("no gloo")) == "ValueError: no gloo"


def test_a_rank_reports_all_of_its_error_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    launch.report(ValueError("too many\nlines"))
    error = ChildFailedError("train", {0: ProcessFailure(0, 7, 1, str(file))})
    assert str(launch.first_cause(error)).endswith("ValueError: too many\nlines")
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


@pytest.mark.parametrize("kind", [Unusable, LossesDiffer])
def test_what_concerns_the_run_is_told_as_it_is(
    kind: type[RunError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    launch.report(kind("what to do"))
    error = ChildFailedError("train", {0: ProcessFailure(0, 7, 1, str(file))})
    found = launch.first_cause(error)
    assert type(found) is kind and str(found) == "what to do"


def test_a_port_that_is_taken_is_refused() -> None:
    (port, *_) = launch.free_ports()
    launch.check_port(port)
    with socket.socket() as taken:
        taken.bind((launch.HOST, 0))
        taken.listen()
        with pytest.raises(Unusable, match="cannot be used"):
            launch.check_port(taken.getsockname()[1])


@pytest.fixture
def signals_as_they_were() -> Generator[None]:
    known = {
        one: signal.getsignal(one)
        for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    }
    yield
    for one, handler in known.items():
        signal.signal(one, handler)
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("signals_as_they_were")
def test_a_port_that_is_taken_meanwhile_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (free, *_) = launch.free_ports()
    wrote = tmp_path / "wrote"
    program = ["-c", f"open({str(wrote)!r}, 'w')"]
    with socket.socket() as taken:
        taken.bind((launch.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(launch, "free_ports", lambda: [port, port])
        with pytest.raises(Unusable, match="can be had for the processes to meet"):
            launch.launch(program, 1, None, debug=False)
        with pytest.raises(Unusable, match=f"--port {port} was tried"):
            launch.launch(program, 1, port, debug=False)
        assert not wrote.exists()
        monkeypatch.setattr(launch, "free_ports", lambda: [port, free])
        launch.launch(program, 1, None, debug=False)
        assert wrote.exists()
