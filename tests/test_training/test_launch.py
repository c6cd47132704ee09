"""Of several ranks that failed, the one that is named failed first and by itself."""

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)

from spmd_moe.training import launch

LOST = launch.told(
    RuntimeError(
        "[/a/gloo/tcp/pair.cc:5] Connection closed by peer [127.0.0.1]:9. Typically"
    )
)


def failures(directory: Path, *ranks: tuple[int, str]) -> ChildFailedError:
    found: dict[int, ProcessFailure] = {}
    for rank, (exit_code, said) in enumerate(ranks):
        file = directory / f"{rank}.json"
        if said:
            content = {"message": said, "extraInfo": {"timestamp": "5"}}
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
    assert said in launch.first_cause(failures(tmp_path, *ranks))


def test_a_lost_connection_is_told_in_one_line() -> None:
    assert LOST.endswith("does not answer: Connection closed by peer [127.0.0.1]:9")
    assert launch.told(ValueError("no gloo")) == "ValueError: no gloo"


def test_a_rank_reports_all_of_its_error_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    launch.report(ValueError("too many\nlines"))
    error = ChildFailedError("train", {0: ProcessFailure(0, 7, 1, str(file))})
    assert launch.first_cause(error).endswith("ValueError: too many\nlines")
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]
