"""Cells of the table: the training of a feature on a column, compared with one device."""

import functools
import math
import re
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Literal

import torch

from placements.testing import RankFailure, run_ranks
from tests.trainer.features import Feature
from tests.trainer.loop import Options, Setting, Trained, train

# What two orders of summation in float64 differ by, relative to the largest value.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Cell:
    """Equal up to `difference`, or refused with a message."""

    difference: float = 0.0
    allowed: float = ROUNDING
    refusal: str | None = None

    @property
    def is_right(self) -> bool:
        return self.refusal is not None or self.difference <= self.allowed

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"refused: {self.refusal}"
        equal = "equal" if self.is_right else "DIFFERENT"
        return f"{equal}, {self.difference:.0e}"


@functools.cache
def on_one_device(options: Options) -> Trained:
    return train(Setting(), options)


def difference(found: Trained, expected: Trained) -> float:
    """The largest one of losses, state and gradients, each relative to its largest value."""
    worst = 0.0
    for a, b in zip(found.losses, expected.losses, strict=True):
        worst = max(worst, abs(a - b) / abs(b))
        if not math.isfinite(a):
            return math.inf
    for a, b in (
        (found.state, expected.state), (found.gradients, expected.gradients)
    ):  # fmt: skip
        assert a.keys() == b.keys()
        for name, value in b.items():
            unit = float(value.double().abs().max()) or 1.0
            off = (a[name].double() - value.double()).abs().max()
            worst = max(worst, float(off) / unit)
            if not torch.isfinite(off):  # max() would pass over it
                return math.inf
    return worst


def allowed(feature: Feature) -> float:
    """Twice what the dtype of the feature costs on one device; else rounding in float64."""
    plain = feature.plain
    if plain.dtype == torch.float64:
        return ROUNDING
    exact = replace(plain, dtype=torch.float64, autocast=False)
    return 2 * difference(on_one_device(plain), on_one_device(exact))


def cell(
    feature: Feature, setting: Setting, backend: Literal["sim", "gloo"] = "sim"
) -> Cell:
    backend = "gloo" if feature.needs_processes else backend
    try:
        with TemporaryDirectory() as folder:
            options = replace(feature.options, directory=folder)
            if setting.parallel.num_ranks == 1:
                ranks = [train(setting, options)]
            else:
                mesh = setting.parallel.dense_mesh()
                ranks = run_ranks(
                    mesh, train, setting, options, backend=backend, timeout=300.0
                )
    except (RankFailure, RuntimeError, TypeError, ValueError) as error:
        return Cell(refusal=message_of(error))
    return judged(feature, ranks)


def judged(feature: Feature, ranks: list[Trained]) -> Cell:
    """All ranks, as every rank has the global values."""
    expected = on_one_device(feature.plain)
    worst = max(difference(rank, expected) for rank in ranks)
    return Cell(worst, allowed(feature))


def message_of(error: BaseException) -> str:
    """The first line, without what differs by run: the rank, and lines of code."""
    line = str(error).strip().splitlines()[0]
    line = re.sub(r"^rank \d+ raised \w+: ", "", line)
    line = re.sub(r" at \w+\.py:\d+", "", line)
    assert line.strip(), f"an error without a message: {error!r}"
    return line
