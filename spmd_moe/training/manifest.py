"""Which checkpoints there are, what each is of, and whether it is still whole.

A checkpoint is a directory that was renamed to its name after everything in it was
written, the manifest last. What was interrupted has another name and is never looked at.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from spmd_moe.training.recipe import Recipe
from spmd_moe.training.text import text_digest

FORMAT = "spmd-moe train 1"
MANIFEST = "manifest.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: one line that says what to do."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is of. The step is also the position in the data."""

    step: int
    recipe: Recipe
    mesh: str
    text: str
    files: dict[str, tuple[int, str]]  # size and digest of each


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The steps that a checkpoint has behind it, by its name."""
    return int(path.name.removeprefix("step-"))


def checkpoints_in(directory: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    found = (path for path in directory.iterdir() if re.fullmatch(r"step-\d+", path.name))
    return sorted(path for path in found if path.is_dir())


def write(directory: Path, step: int, recipe: Recipe, mesh: str) -> None:
    """Add the manifest of the files that are in `directory`."""
    files = {path.name: _fingerprint(path) for path in sorted(directory.iterdir())}
    manifest = Manifest(step, recipe, mesh, text_digest(), files)
    with (directory / MANIFEST).open("w") as file:
        json.dump({"format": FORMAT, **asdict(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> Manifest:
    """The manifest, after looking whether all files are as they were written.

    Raises CheckpointError for a directory that is none, or is damaged.
    """
    otherwise = f"remove {path} to resume from the one before, or start a new run"
    try:
        found = json.loads((path / MANIFEST).read_text())
        if found.pop("format") != FORMAT:
            raise CheckpointError(f"{path} is of another program or version; {otherwise}")
        manifest = Manifest(recipe=Recipe(**found.pop("recipe")), **found)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is no checkpoint of spmd-moe train: it has no {MANIFEST}; {otherwise}"
        ) from None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path / MANIFEST} cannot be read ({error}); {otherwise}"
        ) from None
    for name, written in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is damaged: {name} is missing; {otherwise}")
        if file.stat().st_size != written[0]:
            raise CheckpointError(
                f"{path} is damaged: {name} has {file.stat().st_size} bytes of "
                f"{written[0]}; {otherwise}"
            )
        if _fingerprint(file) != tuple(written):
            raise CheckpointError(
                f"{path} is damaged: {name} is not what was written; {otherwise}"
            )
    return manifest


def check_recipe(manifest: Manifest, path: Path, given: Mapping[str, object]) -> None:
    """Whether the checkpoint is of this text, and its recipe says what is given."""
    for field, value in given.items():
        saved = getattr(manifest.recipe, field)
        if saved != value:
            option = f"--{field.replace('_', '-')}"
            raise CheckpointError(
                f"{path} was trained with {option} {saved}, not {value}: leave the option "
                "out to resume, or start a new run in another directory"
            )
    if manifest.text != text_digest():
        raise CheckpointError(
            f"{path} was trained on another text than this version ships: start a new run"
        )


def _fingerprint(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    return path.stat().st_size, digest.hexdigest()
