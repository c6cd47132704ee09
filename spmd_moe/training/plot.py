"""Plot the losses of a mesh and of one device."""

from pathlib import Path
from typing import Any, cast

from spmd_moe.training.losses import Loss, largest_difference


def plot_losses(losses: list[Loss], path: Path, mesh: str) -> None:
    """Plot both curves, and their relative difference below, as a PNG."""
    from matplotlib.figure import Figure  # an optional extra: only where it is needed

    both = [loss for loss in losses if loss.one_device is not None]
    steps = [loss.step for loss in both]
    worst, at = largest_difference(both)
    figure = cast(Any, Figure(figsize=(8, 6), dpi=120, layout="constrained"))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    above.plot(steps, [loss.loss for loss in both], lw=3, alpha=0.5, label=mesh)
    above.plot(steps, [loss.one_device for loss in both], "k--", lw=1, label="one device")
    above.set_ylabel("loss, nats per byte")
    above.legend()
    above.set_title(f"spmd-moe train: {mesh} and one device")
    floor = 1e-17  # equal losses have to be drawn somewhere
    drawn = {x.step: max(d, floor) for x in both if (d := x.difference) is not None}
    below.semilogy(list(drawn), list(drawn.values()), ".")
    below.set_ylabel("relative difference\n(1e-17: none)")
    below.set_xlabel("step")
    below.set_title(f"largest: {worst:.1e} at step {at}", fontsize="medium")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path)
