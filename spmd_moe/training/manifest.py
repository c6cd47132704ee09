"""Find checkpoints, and say what each is of and whether it is still whole.

A checkpoint is a directory that was renamed to its name after everything in it was
written, the manifest last. A save that was interrupted left another name, which is never
looked at.
"""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from spmd_moe.training.errors import Unusable
from spmd_moe.training.recipe import Recipe
from spmd_moe.training.text import text_digest

FORMAT = "spmd-moe train 1"
MANIFEST = "manifest.json"
INDEX = ".metadata"  # of torch.distributed.checkpoint: which file has which rows


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
    """Return the number of steps of a checkpoint, by its name."""
    return int(path.name.removeprefix("step-"))


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    found = (path for path in directory.iterdir() if re.fullmatch(r"step-\d+", path.name))
    return sorted((path for path in found if path.is_dir()), key=step_of)


def write(directory: Path, step: int, recipe: Recipe, mesh: str) -> None:
    """Add the manifest of the files that are in `directory`."""
    files = {path.name: _fingerprint(path) for path in sorted(directory.iterdir())}
    manifest = Manifest(step, recipe, mesh, text_digest(), files)
    with (directory / MANIFEST).open("w") as file:
        json.dump({"format": FORMAT, **asdict(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def otherwise(path: Path) -> str:
    """Say what to do about a checkpoint that cannot be used."""
    return f"remove {path} to resume from the one before, or start a new run"


def read(path: Path) -> Manifest:
    """Read the manifest, after a check that all files are as they were written.

    Raises Unusable for a directory that is no checkpoint, or is damaged.
    """
    try:
        manifest = _parsed((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise Unusable(
            f"{path} is no checkpoint of spmd-moe train: it has no {MANIFEST}; "
            f"{otherwise(path)}"
        ) from None
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise Unusable(
            f"{path / MANIFEST} cannot be read ({error}); {otherwise(path)}"
        ) from None
    if manifest.step != step_of(path):
        raise Unusable(
            f"{path} is of step {manifest.step}: call it {name_of(manifest.step)} again, "
            f"{otherwise(path)}"
        )
    wrong = _what_is_wrong(path, manifest)
    if wrong is not None:
        raise Unusable(f"{path} {wrong}; {otherwise(path)}")
    return manifest


def _parsed(text: str) -> Manifest:
    found = json.loads(text)
    if found.pop("format") != FORMAT:
        raise ValueError("it is of another program or version")
    recipe = Recipe(**found.pop("recipe"))
    files = {name: (size, digest) for name, (size, digest) in found.pop("files").items()}
    return Manifest(recipe=recipe, files=files, **found)


def _what_is_wrong(path: Path, manifest: Manifest) -> str | None:
    if manifest.text != text_digest():
        return "was trained on another text than this version ships"
    if INDEX not in manifest.files:
        return f"is no checkpoint of torch.distributed: it has no {INDEX}"
    for name, (size, digest) in manifest.files.items():
        file = path / name
        if not file.is_file():
            return f"is damaged: {name} is missing"
        if file.stat().st_size != size:
            return f"is damaged: {name} has {file.stat().st_size} bytes of {size}"
        if _fingerprint(file) != (size, digest):
            return f"is damaged: {name} is not what was written"
    return None


def _fingerprint(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    return path.stat().st_size, digest.hexdigest()
