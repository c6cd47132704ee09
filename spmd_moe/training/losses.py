"""The losses of a run: a log of one JSON object a line, compared with one device."""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from spmd_moe.training.errors import LossesDiffer, Unusable

# How far losses may be from those of one device, relative. Rounding in float32 decides
# between experts that score alike, so its curves part after a while.
TOLERANCE = {"float64": 1e-5, "float32": 1e-3, "bfloat16": 3e-2}

LONGEST = 1 << 30  # bytes of a log: the losses of some ten million steps


@dataclass(frozen=True)
class Loss:
    """The loss of one step, and that of the one-device twin if it ran beside."""

    step: int
    loss: float
    one_device: float | None = None

    @property
    def is_number(self) -> bool:
        """Whether neither this loss nor the twin's is NaN or infinite."""
        return math.isfinite(self.loss) and math.isfinite(self.one_device or 0.0)

    @property
    def difference(self) -> float | None:
        """The difference relative to the twin; None without two numbers to compare."""
        if self.one_device is None or not self.is_number:
            return None
        least = sys.float_info.min
        return abs(self.loss - self.one_device) / max(abs(self.one_device), least)


class LossLog:
    """A file that gets a line for each step; lines of steps after `start` are removed."""

    def __init__(self, path: Path | None, start: int) -> None:
        self.losses: list[Loss] = []
        if path is not None and start and path.is_file():
            self.losses = [loss for loss in read_losses(path) if loss.step <= start]
        self._path = path

    def __enter__(self) -> "LossLog":
        self._file = None
        if self._path is not None:
            new = unfinished(self._path)
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


def unfinished(log: Path) -> Path:
    """Return what a log is called until it has all lines that are kept."""
    return log.with_name(f"{log.name}.new")


def _line(loss: Loss) -> str:
    """Write a loss as JSON, where NaN and infinity are null."""
    said = {name: value for name, value in vars(loss).items() if value is not None}
    valid = {name: x if math.isfinite(x) else None for name, x in said.items()}
    return json.dumps(valid) + "\n"


def read_losses(path: Path) -> list[Loss]:
    """Read the losses of a log, but for a last line that the end of a run cut short.

    Raises Unusable if the file is no such log.
    """
    if path.stat().st_size > LONGEST:
        raise Unusable(
            f"{path} has {path.stat().st_size:,} bytes, too many for a log of losses; move "
            "it away to resume without the losses until now, or name another by --log"
        )
    losses: list[Loss] = []
    try:
        for line in path.read_bytes().split(b"\n")[:-1]:
            losses.append(_parsed(json.loads(line)))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Unusable(
            f"{path} is no log of losses (see line {len(losses) + 1}); move it away to "
            "resume without the losses until now, or name another by --log"
        ) from None
    return losses


def _parsed(said: Any) -> Loss:
    step, *others = said.pop("step"), *said.items()
    numbers = {name: math.nan if x is None else float(x) for name, x in others}
    return Loss(int(step), **numbers)


def largest_difference(losses: list[Loss]) -> tuple[float, int]:
    """Return the largest relative difference from one device, and its step; else (0, 0)."""
    found = [(loss.difference, loss.step) for loss in losses]
    return max(((d, step) for d, step in found if d is not None), default=(0.0, 0))


def first_without_number(losses: list[Loss]) -> Loss | None:
    """Return the first loss that is no number: there training diverged."""
    return next((loss for loss in losses if not loss.is_number), None)


def check_equal(losses: list[Loss], dtype: str) -> None:
    """Raise LossesDiffer if rounding does not explain the difference from one device."""
    diverged = first_without_number(losses)
    if diverged is not None:
        raise LossesDiffer(
            f"the loss is not a number from step {diverged.step} on ({_where(diverged)}), "
            "so nothing after it is compared"
        )
    worst, at = largest_difference(losses)
    allowed = TOLERANCE[dtype]
    if worst > allowed:
        raise LossesDiffer(
            f"at step {at} the loss differs by {worst:.1e} from that of one device; "
            f"rounding in {dtype} explains at most {allowed:.0e}"
        )


def _where(diverged: Loss) -> str:
    if math.isfinite(diverged.loss):
        return "on one device alone"
    if diverged.one_device is None or math.isfinite(diverged.one_device):
        return "on the mesh alone"
    return "on the mesh and on one device"
