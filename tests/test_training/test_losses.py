"""The log of losses, and the plot of two curves."""

from pathlib import Path

import pytest

from spmd_moe.training.losses import (
    Loss,
    LossesDiffer,
    LossLog,
    check_equal,
    largest_difference,
    plot_losses,
    read_losses,
)


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


def test_the_largest_difference_is_relative_and_knows_its_step(tmp_path: Path) -> None:
    losses = [Loss(1, 4.0, 4.0), Loss(2, 2.0, 2.5), Loss(3, 1.0, 1.1), Loss(4, 9.0)]
    assert largest_difference(losses) == (0.2, 2)
    assert largest_difference([Loss(4, 9.0)]) == (0.0, 0)
    check_equal([Loss(1, 1.000001, 1.0)], "float64")
    for wrong in (2.0, float("nan")):
        with pytest.raises(LossesDiffer, match=r"at step 1 .* one device"):
            check_equal([Loss(1, wrong, 1.0), Loss(2, 1.0, 1.0)], "float64")
    plot_losses(losses, tmp_path / "plot.png", "tp=2")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
