"""Find checkpoints, and say what each is of and whether it is still whole.

A checkpoint is a directory that was renamed to its name after everything in it was
written, the manifest last. A save that was interrupted left another name, which is never
looked at. The manifest has a digest of every file and of itself, and names its run.
"""

import hashlib
import json
import os
import re
import secrets
import stat
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from spmd_moe.training.errors import Damaged, Unusable
from spmd_moe.training.recipe import DTYPES, Recipe
from spmd_moe.training.text import VOCABULARY, text_digest

FORMAT = "spmd-moe train 2"
MANIFEST = "manifest.json"
INDEX = ".metadata"  # of torch.distributed.checkpoint: which file has which rows
RUN = "run.json"  # of the directory of a run: which run it belongs to
LONGEST = 1 << 24  # bytes of a manifest
MOST_TOKENS = 1 << 31  # of a batch


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is of. The step is also the position in the data."""

    run: str
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
    return [path for path in named_in(directory) if path.is_dir()]


def named_in(directory: Path) -> list[Path]:
    """Return all that has the name of a checkpoint, whatever it is, oldest first."""
    if not directory.is_dir():
        return []
    found = (path for path in directory.iterdir() if re.fullmatch(r"step-\d+", path.name))
    return sorted(found, key=step_of)


def start_run(directory: Path) -> str:
    """Give the directory a new run, whose checkpoints name it; return its id."""
    run, new = secrets.token_hex(8), directory / f".{RUN}"
    try:
        new.unlink(missing_ok=True)
        _write(new, _sealed({"format": FORMAT, "run": run}))
        os.replace(new, directory / RUN)
    except OSError as error:
        raise Unusable(
            f"{directory / RUN} cannot be written ({error.strerror}): remove it and {new}, "
            "or name another directory"
        ) from None
    return run


def run_of(directory: Path) -> str | None:
    """Return the id of the run that a directory belongs to; None if nothing says."""
    file = directory / RUN
    try:
        return _text(_opened(file), "run")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Unusable(
            f"{file} cannot be read ({error}); remove it if all checkpoints in {directory} "
            "are of one run"
        ) from None


def write(directory: Path, step: int, recipe: Recipe, mesh: str) -> None:
    """Add the manifest of the files that are in `directory`, a part of that of the run."""
    run = run_of(directory.parent) or start_run(directory.parent)
    files = {path.name: _fingerprint(path) for path in sorted(directory.iterdir())}
    manifest = Manifest(run, step, recipe, mesh, text_digest(), files)
    _write(directory / MANIFEST, _sealed({"format": FORMAT, **asdict(manifest)}))


def otherwise(path: Path) -> str:
    """Say what to do about a checkpoint that cannot be used."""
    return f"remove {path} to resume from the one before, or start a new run"


def read(path: Path) -> Manifest:
    """Read the manifest, after a check that all files are as they were written.

    Raises Damaged for a checkpoint that is not what was written, and Unusable for one that
    is whole but of something else.
    """
    try:
        manifest = _parsed(_opened(path / MANIFEST))
    except FileNotFoundError:
        raise Damaged(
            f"{path} is no checkpoint of spmd-moe train: it has no {MANIFEST}; "
            f"{otherwise(path)}"
        ) from None
    except (OSError, TypeError, ValueError) as error:
        raise Damaged(
            f"{path / MANIFEST} cannot be read ({error}); {otherwise(path)}"
        ) from None
    if manifest.step != step_of(path):
        raise Unusable(
            f"{path} is of step {manifest.step}: call it {name_of(manifest.step)} again, "
            f"{otherwise(path)}"
        )
    for wrong in (_of_something_else(path, manifest), _too_large(manifest)):
        if wrong is not None:
            raise Unusable(f"{path} {wrong}; {otherwise(path)}")
    damage = _damage(path, manifest)
    if damage is not None:
        raise Damaged(f"{path} is damaged: {damage}; {otherwise(path)}")
    return manifest


def read_last(paths: list[Path]) -> tuple[Path, Manifest, list[Damaged]]:
    """Read the last checkpoint that is whole; and say what is wrong with those after it.

    Raises what is wrong with the last one if none is whole, or if it is of something else.
    """
    damaged: list[Damaged] = []
    for path in reversed(paths):
        try:
            return path, read(path), damaged
        except Damaged as error:
            damaged.append(error)
    raise damaged[0]


def _sealed(content: dict[str, Any]) -> str:
    """Return the content as JSON, with a digest of all of it."""
    return json.dumps({**content, "digest": _digest(content)}, indent=1)


def _opened(file: Path) -> dict[str, Any]:
    """Return what `_sealed` was given; ValueError if it is anything else."""
    content: Any = None
    try:
        content = json.loads(_regular(file, LONGEST))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    found = cast(dict[str, Any], content)
    digest = found.pop("digest", None)
    if digest != _digest(found):
        other = "it is of another program or version"
        raise ValueError(other if digest is None else "it is not what was written")
    if found.pop("format", None) != FORMAT:
        raise ValueError("it is of another program or version")
    return found


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _write(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _regular(file: Path, most: int) -> str:
    """Return the text of a regular file; a pipe would be waited for."""
    size = _size(file)
    if size is None:
        raise ValueError("it is no regular file")
    if size > most:
        raise ValueError(f"it has {size} bytes")
    return file.read_bytes().decode()


def _size(file: Path) -> int | None:
    found = os.lstat(file)
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _parsed(found: dict[str, Any]) -> Manifest:
    if {*found} != {field.name for field in fields(Manifest)}:
        raise ValueError(f"it has the entries {', '.join(found)}")
    step, files = found["step"], found["files"]
    if type(step) is not int or step < 0:
        raise ValueError(f"its step is {step!r}")
    if not isinstance(files, dict):
        raise ValueError("it has no list of files")
    every = cast(dict[str, Any], files)
    return Manifest(
        _text(found, "run"),
        step,
        _recipe(found["recipe"]),
        _text(found, "mesh"),
        _text(found, "text"),
        dict(_file(name, said) for name, said in every.items()),
    )


def _text(found: dict[str, Any], name: str) -> str:
    if not isinstance(found.get(name), str):
        raise ValueError(f"its {name} is {found.get(name)!r}")
    return found[name]


def _recipe(found: Any) -> Recipe:
    if not isinstance(found, dict):
        raise ValueError("it has no recipe")
    said = cast(dict[str, Any], found)
    for name, usual in asdict(Recipe()).items():
        if type(said.get(name)) is not type(usual):
            raise ValueError(f"its {name} is {said.get(name)!r}")
    return Recipe(**said)


def _file(name: str, said: Any) -> tuple[str, tuple[int, str]]:
    if Path(name).name != name or name in (MANIFEST, "..", "."):
        raise ValueError(f"it names the file {name!r}")
    size, digest = said
    if type(size) is not int or not isinstance(digest, str):
        raise ValueError(f"it says {said!r} of {name!r}")
    return name, (size, digest)


def _of_something_else(path: Path, manifest: Manifest) -> str | None:
    if manifest.text != text_digest():
        return "was trained on another text than this version ships"
    if INDEX not in manifest.files:
        return f"is no checkpoint of torch.distributed: it has no {INDEX}"
    run = run_of(path.parent)
    if run is not None and manifest.run != run:
        return f"is of the run {manifest.run}, but {path.parent} is of the run {run}"
    if run is None:  # so the checkpoints must agree among themselves
        for other in checkpoints_in(path.parent):
            try:
                theirs = _parsed(_opened(other / MANIFEST)).run
            except (OSError, TypeError, ValueError):
                continue  # that it is damaged is said when it is read
            if theirs != manifest.run:
                return f"is of another run than {other}"
    return None


def _too_large(manifest: Manifest) -> str | None:
    """Say so if the files cannot hold a model of these sizes, which is made first.

    The largest parameters are counted.
    """
    recipe = manifest.recipe
    experts = 3 * recipe.num_experts * recipe.dim * recipe.hidden_dim
    numbers = VOCABULARY * recipe.dim + recipe.layers * (4 * recipe.dim**2 + experts)
    least = numbers * DTYPES[recipe.dtype].itemsize
    if least > sum(size for size, _ in manifest.files.values()):
        return f"says sizes of at least {least:,} bytes, which its files do not have"
    if recipe.batch * recipe.seq_len > MOST_TOKENS:
        return f"says batches of {recipe.batch * recipe.seq_len:,} tokens"
    return None


def _damage(path: Path, manifest: Manifest) -> str | None:
    for name, (size, digest) in manifest.files.items():
        file = path / name
        try:
            found = _size(file)
            if found is None:
                return f"{name} is no regular file"
            if found != size:
                return f"{name} has {found} bytes of {size}"
            if _fingerprint(file) != (size, digest):
                return f"{name} is not what was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def _fingerprint(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    return path.stat().st_size, digest.hexdigest()
