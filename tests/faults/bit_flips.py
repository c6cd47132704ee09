"""Flip bits in the files of a checkpoint: each flip is refused, or changes nothing."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from spmd_moe.training import checkpoints, manifest
from spmd_moe.training.errors import Unusable
from spmd_moe.training.trainer import one_device

State = dict[str, Tensor]


def check_bit_flips(path: Path, flips: int, seed: int = 0) -> Counter[str]:
    """Flip so many bits of a checkpoint of `spmd-moe train`, one at a time.

    Returns how often it was refused and how often the flip was harmless, by file. Raises
    AssertionError for a flip after which something else is resumed, without a word.
    """
    original = manifest.read(path)

    def resumed() -> State:
        found = manifest.read(path)
        assert found == original, "a flipped bit changed what is resumed"
        return _resumed(path)

    return judge_flips(path, flips, resumed, (Unusable,), seed)


def judge_flips(
    path: Path,
    flips: int,
    loaded: Callable[[], State],
    refusals: tuple[type[Exception], ...],
    seed: int = 0,
) -> Counter[str]:
    """Flip bits of all files below `path`; what is still loaded must be what it was."""
    expected = loaded()
    found: Counter[str] = Counter()
    for file, bit in _places(path, flips, seed):
        with _flipped(file, bit):
            try:
                state = loaded()
            except refusals:
                found[f"{file.name} refused"] += 1
                continue
            except Exception as error:
                raise AssertionError(f"{file.name}, bit {bit}: {error!r}") from error
            assert _equal(state, expected), f"{file.name}, bit {bit}: other values"
            found[f"{file.name} harmless"] += 1
    assert _equal(loaded(), expected)
    return found


def _places(path: Path, flips: int, seed: int) -> Iterator[tuple[Path, int]]:
    """Draw a file, each as often as the others, and a bit of it."""
    drawn = random.Random(seed)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    for _ in range(flips):
        file = drawn.choice(files)
        yield file, drawn.randrange(8 * file.stat().st_size)


@contextmanager
def _flipped(file: Path, bit: int) -> Iterator[None]:
    whole = file.read_bytes()
    damaged = bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    file.write_bytes(damaged)
    try:
        yield
    finally:
        file.write_bytes(whole)


def _resumed(path: Path) -> State:
    trainer = one_device(manifest.read(path).recipe)
    checkpoints.load(trainer, path)
    state = dict(trainer.model.state_dict())
    for number, moments in trainer.optimizer.state_dict()["state"].items():
        state |= {f"{number}.{key}": value for key, value in moments.items()}
    return state


def _equal(first: State, second: State) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) for name, value in first.items()
    )
