"""The losses of a run: a log of one JSON object a line, and a plot beside one device."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

# How far losses may be from those of one device, relative. Rounding in float32 decides
# between experts that score alike, so its curves part after a while.
TOLERANCE = {"float64": 1e-5, "float32": 1e-3}


class LossesDiffer(Exception):  # noqa: N818 - a finding, not a failure of the program
    """The mesh and one device were trained alike and did not stay equal."""


@dataclass(frozen=True)
class Loss:
    """The loss of one step, and that of the one-device twin if it ran beside."""

    step: int
    loss: float
    one_device: float | None = None

    @property
    def difference(self) -> float | None:
        """Relative to the twin; infinite if either is no number."""
        if self.one_device is None:
            return None
        found = abs(self.loss - self.one_device) / abs(self.one_device)
        return math.inf if math.isnan(found) else found


class LossLog:
    """A file that gets a line for each step; steps after `start` are forgotten first."""

    def __init__(self, path: Path | None, start: int) -> None:
        self.losses: list[Loss] = []
        if path is not None and start and path.is_file():
            self.losses = [loss for loss in read_losses(path) if loss.step <= start]
        self._path = path

    def __enter__(self) -> "LossLog":
        self._file = None
        if self._path is not None:
            new = self._path.with_name(f"{self._path.name}.new")
            new.write_text("".join(map(_line, self.losses)))
            new.replace(self._path)
            self._file = self._path.open("a")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, loss: Loss) -> None:
        self.losses.append(loss)
        if self._file is not None:
            self._file.write(_line(loss))
            self._file.flush()


def _line(loss: Loss) -> str:
    said = {name: value for name, value in vars(loss).items() if value is not None}
    return json.dumps(said) + "\n"


def read_losses(path: Path) -> list[Loss]:
    """The losses of a log, up to a line that the end of a run cut short."""
    losses: list[Loss] = []
    for line in path.read_text().splitlines():
        try:
            losses.append(Loss(**json.loads(line)))
        except json.JSONDecodeError:
            break
    return losses


def largest_difference(losses: list[Loss]) -> tuple[float, int]:
    """Between mesh and one device, relative, and the step; (0, 0) if none was compared."""
    found = [(loss.difference, loss.step) for loss in losses]
    return max(((d, step) for d, step in found if d is not None), default=(0.0, 0))


def check_equal(losses: list[Loss], dtype: str) -> None:
    """LossesDiffer if rounding does not explain how far the mesh is from one device."""
    worst, at = largest_difference(losses)
    allowed = TOLERANCE[dtype]
    if not worst <= allowed:
        raise LossesDiffer(
            f"at step {at} the loss differs by {worst:.1e} from that of one device; "
            f"rounding in {dtype} explains at most {allowed:.0e}"
        )


def plot_losses(losses: list[Loss], path: Path, mesh: str) -> None:
    """Both curves over each other, and their relative difference below, as a PNG."""
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
    below.semilogy(steps, [max(loss.difference or 0.0, floor) for loss in both], ".")
    below.set_ylabel("relative difference\n(1e-17: none)")
    below.set_xlabel("step")
    below.set_title(f"largest: {worst:.1e} at step {at}", fontsize="medium")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path)
