"""Check the options of `spmd-moe train` before anything is started."""

import argparse
import importlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from spmd_moe.checks.errors import BadInput
from spmd_moe.cli.degrees import parse_parallel, print_parallel
from spmd_moe.config import Parallel
from spmd_moe.training.errors import Damaged
from spmd_moe.training.job import Job
from spmd_moe.training.lock import locked
from spmd_moe.training.losses import read_losses, unfinished
from spmd_moe.training.manifest import Manifest, checkpoints_in, read_last, start_run
from spmd_moe.training.meeting import check_port
from spmd_moe.training.recipe import FIELDS, Recipe
from spmd_moe.training.text import batch_of
from spmd_moe.training.world import LAST_PORT, World, tasks_for_srun

# Of torch.compile; the last two trace, and run the graph as eager mode would.
_BACKENDS = ("inductor", "aot_eager", "eager")

LONGEST = 86_400  # seconds that a rank may wait for another

_OPTIONS = {
    "num_experts": "--experts",
    "num_shared_experts": "--shared-experts",
    "seq_len": "--seq",
}
_NAMED = re.compile(rf"\b({'|'.join(FIELDS)})\b(?= [(*])")


def option_of(field: str) -> str:
    """Return the option for a field of the recipe; `spmd-moe check` has the same."""
    return _OPTIONS.get(field, f"--{field.replace('_', '-')}")


def make_job(args: argparse.Namespace, world: World | None, held: ExitStack) -> Job:
    """Make the job of these options; BadInput or Unusable if it cannot be done.

    This process holds the directory of the run until `held` is closed.
    """
    _check_numbers(args)
    parallel = parse_parallel(args.mesh)
    _check_processes(parallel, args, world)
    if args.port is not None and world is None:
        check_port(args.port)
    if args.compare is not None:
        _check_plot(args.compare)
    if args.compile is not None:
        _check_backend(args.compile)
    given = {
        name: getattr(args, name) for name in FIELDS if getattr(args, name) is not None
    }
    recipe = None if args.resume else _fresh(given, parallel)
    _check_places(args)
    directory = None if args.checkpoint is None else Path(args.checkpoint)
    log = args.log if directory is None or args.log else str(directory / "losses.jsonl")
    if log is not None:
        for file in (Path(log), unfinished(Path(log))):
            _check_file("--log", file)
    if directory is not None and (world is None or world.rank == 0):
        held.enter_context(locked(directory))
    resume = None
    if found := _checkpoints(args):
        resume, saved, damaged = read_last(found)
        if world is None or world.rank == 0:
            _tell_of_damage(damaged, resume)
        recipe = _saved(resume, saved, given, parallel, args.steps)
        if log is not None and Path(log).exists():
            read_losses(Path(log))
    elif directory is not None and (world is None or world.rank == 0):
        start_run(directory)
    assert recipe is not None
    return Job(
        recipe=recipe, parallel=parallel, mesh=print_parallel(parallel), steps=args.steps,
        checkpoint=args.checkpoint, save_every=args.save_every, keep=args.keep,
        resume=resume and str(resume), verify_every=args.verify, compare=args.compare,
        log=log, timeout=args.timeout, fsdp=args.fsdp, backend=args.compile,
    )  # fmt: skip


def _check_numbers(args: argparse.Namespace) -> None:
    for name, least in (("steps", 1), ("save_every", 0), ("keep", 1), ("verify", 0)):
        if getattr(args, name) < least:
            option = f"--{name.replace('_', '-')}"
            raise BadInput(f"{option} is {getattr(args, name)}; give at least {least}")
    if args.port is not None and not 1 <= args.port <= LAST_PORT:
        raise BadInput(f"--port is {args.port}; give one from 1 to {LAST_PORT}")
    if not 0.001 <= args.timeout <= LONGEST:
        raise BadInput(f"--timeout is {args.timeout}; give seconds, up to {LONGEST}")


def _check_processes(
    parallel: Parallel, args: argparse.Namespace, world: World | None
) -> None:
    ranks, mesh = parallel.num_ranks, print_parallel(parallel)
    if args.processes not in (None, ranks):
        found = f"--processes is {args.processes}"
    elif world is not None and world.size != ranks:
        found = f"this job has {world.size}"
    elif world is None and ranks > 1 and (tasks := tasks_for_srun(os.environ)) > 1:
        raise BadInput(
            f"this Slurm allocation has {tasks} tasks, which srun starts: "
            f"srun --ntasks {ranks} spmd-moe train --mesh {mesh} ..."
        )
    else:
        return
    raise BadInput(
        f"--mesh {mesh} is for {ranks} (dp * cp * tp) processes, but {found}: change the "
        "degrees or the number of processes"
    )


def _check_plot(path: str) -> None:
    if Path(path).suffix != ".png":
        raise BadInput(f"--compare {path}: the plot is a PNG, so name a file .png")
    try:
        importlib.import_module("matplotlib.figure")
    except Exception as error:  # one that was built for another numpy raises anything
        raise BadInput(
            f"--compare needs matplotlib, which cannot be imported ({error}): "
            "pip install 'spmd-moe[plot]'"
        ) from None


def _check_backend(backend: str) -> None:
    if backend not in _BACKENDS:
        raise BadInput(f"--compile {backend}: give one of {', '.join(_BACKENDS)}")
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    if backend == "inductor" and not any(map(shutil.which, compilers)):
        raise BadInput(
            f"--compile inductor needs a C++ compiler, and {' or '.join(compilers)} is not "
            "here: install one or name it in CXX, or give --compile aot_eager, which needs "
            "none"
        )


def _fresh(given: dict[str, Any], parallel: Parallel) -> Recipe:
    with _options_named():
        recipe = Recipe(**given)
        recipe.check_fits(parallel)
        batch_of(recipe, 1)
    return recipe


def _tell_of_damage(damaged: list[Damaged], resume: Path) -> None:
    for error in damaged:
        print(f"spmd-moe train: {error}", file=sys.stderr)
    if damaged:
        print(f"spmd-moe train: resuming from {resume} instead", file=sys.stderr)


def _saved(
    resume: Path,
    manifest: Manifest,
    given: dict[str, Any],
    parallel: Parallel,
    steps: int,
) -> Recipe:
    for field, value in given.items():
        saved = getattr(manifest.recipe, field)
        if saved != value:
            raise BadInput(
                f"{resume} was trained with {option_of(field)} {saved}, not {value}: leave "
                "the option out to resume, or start a new run in another directory"
            )
    if manifest.step >= steps:
        raise BadInput(
            f"{resume} has {manifest.step} steps behind it; give more by --steps"
        )
    with _options_named():
        manifest.recipe.check_fits(parallel)
    return manifest.recipe


@contextmanager
def _options_named() -> Generator[None]:
    """Turn a ValueError about fields into BadInput about the options that set them."""
    try:
        yield
    except ValueError as error:
        said = _NAMED.sub(lambda field: option_of(field[0]), str(error))
        raise BadInput(said) from None


def _check_places(args: argparse.Namespace) -> None:
    """Raise BadInput unless all output can be written; make the directories for it."""
    if args.checkpoint is not None:
        if args.resume and not Path(args.checkpoint).is_dir():
            raise _nothing_to_resume(args)
        _check_writable("--checkpoint", Path(args.checkpoint))
    for option, file in (("--log", args.log), ("--compare", args.compare)):
        if file is None:
            continue
        _check_writable(option, Path(file).parent)
        _check_file(option, Path(file))


def _check_writable(option: str, directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise BadInput(
            f"{option}: cannot write in {directory} ({error.strerror}): name another place"
        ) from None


def _check_file(option: str, file: Path) -> None:
    """Raise BadInput if something else than a regular file is there.

    A pipe would be waited for, and a device replaced.
    """
    if file.is_dir():
        raise BadInput(f"{option} {file} is a directory: name a file")
    if os.path.lexists(file) and not file.is_file():
        raise BadInput(f"{option} {file} is no regular file: remove it or name another")
    if file.exists() and not os.access(file, os.W_OK):
        raise BadInput(f"{option} {file} cannot be written: name another file")


def _checkpoints(args: argparse.Namespace) -> list[Path]:
    """Return the checkpoints of the run to resume; none for a new run."""
    if args.checkpoint is None:
        if args.resume:
            raise BadInput("--resume needs --checkpoint DIR, the directory of the run")
        return []
    found = checkpoints_in(Path(args.checkpoint))
    if args.resume and not found:
        raise _nothing_to_resume(args)
    if found and not args.resume:
        raise BadInput(
            f"{args.checkpoint} has a run in it ({found[-1].name}): continue it with "
            "--resume, or name another directory"
        )
    return found


def _nothing_to_resume(args: argparse.Namespace) -> BadInput:
    return BadInput(
        f"{args.checkpoint} has no complete checkpoint: start without --resume, or name "
        "the directory of the run"
    )
