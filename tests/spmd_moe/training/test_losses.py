"""The log of losses, and how far they are from those of one device."""

import json
import math
from pathlib import Path

import pytest

from spmd_moe.training.errors import LossesDiffer, Unusable
from spmd_moe.training.losses import (
    Loss,
    LossLog,
    check_equal,
    largest_difference,
    read_losses,
)
from spmd_moe.training.plot import plot_losses

NAN, INFINITE = math.nan, math.inf


def write(path: Path, start: int, steps: range) -> None:
    with LossLog(path, start) as log:
        for step in steps:
            log.add(Loss(step, 1 / step))


def test_a_resumed_log_forgets_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    write(path, 0, range(1, 8))
    with path.open("a") as file:
        file.write('{"step": 8, "lo')  # the run was killed here
    assert [loss.step for loss in read_losses(path)] == list(range(1, 8))
    write(path, 4, range(5, 7))
    assert read_losses(path) == [Loss(step, 1 / step) for step in range(1, 7)]
    write(path, 0, range(1, 3))
    assert [loss.step for loss in read_losses(path)] == [1, 2]


@pytest.mark.parametrize(
    "line",
    [b"[1]", b"\xff\xfe", b"", b"7", b"{}", b'{"step": 1}', b'{"step": "a", "loss": 1}',
     b'{"step": 1, "loss": 2, "other": 3}', b'{"step": 1, "loss": "x"}'],
)  # fmt: skip
def test_what_is_no_log_is_refused(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.5}\n' + line + b"\n")
    with pytest.raises(Unusable, match=r"no log of losses \(see line 2\); move it away"):
        read_losses(path)


def test_a_log_without_end_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(Unusable, match="4,398,046,511,104 bytes, too many"):
        read_losses(path)


def test_a_log_is_json_when_the_loss_is_not_a_number(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    with LossLog(path, 0) as log:
        for loss in (Loss(1, 2.5, 2.5), Loss(2, NAN, INFINITE), Loss(3, -INFINITE)):
            log.add(loss)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    lines = path.read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse) for line in lines] == [
        {"step": 1, "loss": 2.5, "one_device": 2.5},
        {"step": 2, "loss": None, "one_device": None},
        {"step": 3, "loss": None},
    ]
    first, second, third = read_losses(path)
    assert first.is_number and not second.is_number and not third.is_number
    assert third.one_device is None


def test_the_largest_difference_is_relative_and_knows_its_step(tmp_path: Path) -> None:
    losses = [Loss(1, 4.0, 4.0), Loss(2, 2.0, 2.5), Loss(3, 1.0, 1.1), Loss(4, 9.0)]
    assert largest_difference(losses) == (0.2, 2)
    assert largest_difference([Loss(4, 9.0)]) == (0.0, 0)
    assert largest_difference([Loss(1, 0.0, 0.0)]) == (0.0, 1)
    check_equal([Loss(1, 1.000001, 1.0)], "float64")
    with pytest.raises(LossesDiffer, match=r"at step 1 .* one device"):
        check_equal([Loss(1, 2.0, 1.0), Loss(2, 1.0, 1.0)], "float64")


@pytest.mark.parametrize(
    ("diverged", "where"),
    [
        ((NAN, NAN), "on the mesh and on one device"),
        ((INFINITE, 1.0), "on the mesh alone"),
        ((1.0, NAN), "on one device alone"),
    ],
)
def test_a_run_that_diverged_is_not_called_equal(
    diverged: tuple[float, float], where: str, tmp_path: Path
) -> None:
    losses = [Loss(1, 2.0, 2.0), Loss(2, *diverged), Loss(3, *diverged)]
    assert largest_difference(losses) == (0.0, 1)
    with pytest.raises(LossesDiffer, match=f"not a number from step 2 on .{where}"):
        check_equal(losses, "float64")


@pytest.mark.parametrize(
    "losses", [[Loss(1, 4.0, 4.0), Loss(2, NAN, NAN)], [Loss(1, NAN, NAN)]]
)
def test_every_run_can_be_drawn(losses: list[Loss], tmp_path: Path) -> None:
    plot_losses(losses, tmp_path / "plot.png", "tp=2")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
