"""`spmd-moe train`: a small language model on local processes, or inside a job."""

import argparse
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from spmd_moe.cli.degrees import SYNTAX, parse_parallel, print_parallel
from spmd_moe.cli.terminal import BadInput
from spmd_moe.config import Parallel
from spmd_moe.training.job import Job
from spmd_moe.training.launch import RankFailed, check_port, launch, told
from spmd_moe.training.losses import LossesDiffer
from spmd_moe.training.manifest import check_recipe, checkpoints_in, read, step_of
from spmd_moe.training.recipe import DTYPES, FIELDS, Recipe
from spmd_moe.training.text import batch_of
from spmd_moe.training.world import ALONE, World, given_world

EXAMPLES = """\
examples:
  spmd-moe train                                   one process, 200 steps
  spmd-moe train --mesh dp=2,tp=2,ep=2,sp=on       four processes, by torch's launcher
  spmd-moe train --mesh tp=2,ep=2 --compare        the one-device twin beside it, and a plot
  spmd-moe train --mesh tp=2 --verify 10           types and values checked every 10 steps
  spmd-moe train --mesh dp=2,tp=2,ep=2 --checkpoint run
  spmd-moe train --mesh tp=2 --checkpoint run --resume --steps 400      on another mesh
  torchrun --nproc-per-node 4 -m spmd_moe train --mesh dp=2,tp=2,ep=2   inside a job
  srun --ntasks 4 spmd-moe train --mesh dp=2,tp=2,ep=2                  inside Slurm

The losses do not depend on the mesh. A run that was killed is continued from its last
complete checkpoint with the same command and --resume.
"""

LONGEST = 86_400  # seconds that a rank may wait for another

HELP = {
    "layers": "blocks of attention and MoE",
    "dim": "width of the model",
    "heads": "attention heads",
    "hidden_dim": "hidden units of an expert",
    "num_experts": "routed experts of a layer",
    "top_k": "experts of a token",
    "num_shared_experts": "experts that every token takes",
    "seq_len": "bytes of a sequence",
    "batch": "sequences of a step, over all ranks",
    "lr": "learning rate of AdamW",
    "seed": "of the weights and of the batches",
    "dtype": f"one of {', '.join(DTYPES)}",
}


# fmt: off
def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--mesh", default="", metavar="DEGREES",
        help=f"such as {SYNTAX}; default: one rank")
    add("--processes", type=int, metavar="N",
        help="default: as many as the mesh has ranks")
    add("--steps", type=int, default=200, metavar="N",
        help="steps in all (%(default)s)")
    add("--checkpoint", metavar="DIR",
        help="where checkpoints and the log of losses go")
    add("--save-every", type=int, default=50, metavar="N",
        help="steps between checkpoints (%(default)s); the last step is always saved")
    add("--keep", type=int, default=2, metavar="K",
        help="checkpoints to keep (%(default)s)")
    add("--resume", action="store_true",
        help="continue from the last checkpoint, on this mesh or another")
    add("--verify", type=int, default=0, metavar="N",
        help="check types and values, by verify(), every N steps")
    add("--compare", nargs="?", const="losses.png", metavar="PNG",
        help="train the one-device twin too and plot both losses (%(const)s)")
    add("--log", metavar="FILE",
        help="losses as JSON lines; default: losses.jsonl in the checkpoint directory")
    add("--port", type=int, metavar="PORT",
        help="where the processes meet; default: a free one")
    add("--timeout", type=float, default=120.0, metavar="SECONDS",
        help="how long a rank waits for another (%(default)s)")
    model = parser.add_argument_group("model", "with --resume: as in the checkpoint")
    for name in FIELDS:
        model.add_argument(
            f"--{name.replace('_', '-')}", metavar=name.split("_")[-1].upper(),
            type={"lr": float, "dtype": str}.get(name, int),
            help=f"{HELP[name]} ({getattr(Recipe(), name)})",
        )
# fmt: on


def run(args: argparse.Namespace, console: Console) -> int:
    world = given_world(os.environ, args.port)
    try:
        job = make_job(args, world)
    except (BadInput, ValueError):
        if world is not None and world.rank != 0 and not args.debug:
            return 2  # rank 0 says it
        raise
    try:
        if world is not None or job.parallel.num_ranks == 1:
            from spmd_moe.training.loop import train  # the launcher does not need it

            train(job, world or ALONE, console)
        else:
            ranks = f"{job.parallel.num_ranks} processes ({print_parallel(job.parallel)})"
            console.print(f"Starting {ranks} ...", highlight=False)
            launch(job, args.port, debug=args.debug)
    except (RankFailed, LossesDiffer, RuntimeError, OSError) as error:
        if args.debug:
            raise
        print(f"spmd-moe train: {_told(error, world)}{_hint(job)}", file=sys.stderr)
        return 1
    return 0


def make_job(args: argparse.Namespace, world: World | None) -> Job:
    """Everything that is asked for, if it can be done; BadInput or ValueError if not."""
    for name, least in (("steps", 1), ("save_every", 0), ("keep", 1), ("verify", 0)):
        if getattr(args, name) < least:
            option = f"--{name.replace('_', '-')}"
            raise BadInput(f"{option} is {getattr(args, name)}; give at least {least}")
    if not 0 < args.timeout <= LONGEST:
        raise BadInput(f"--timeout is {args.timeout}; give seconds, up to {LONGEST}")
    parallel = parse_parallel(args.mesh)
    _check_processes(parallel, args, world)
    given = {
        name: getattr(args, name) for name in FIELDS if getattr(args, name) is not None
    }
    resume = _checkpoint_to_resume(args)
    if resume is None:
        recipe = Recipe(**given)
    else:
        manifest = read(resume)
        check_recipe(manifest, resume, given)
        recipe = manifest.recipe
        if manifest.step >= args.steps:
            raise BadInput(
                f"{resume} has {manifest.step} steps behind it; give more by --steps"
            )
    recipe.check_fits(parallel)
    batch_of(recipe, 1)
    directory = args.checkpoint
    log = args.log or (None if directory is None else str(Path(directory) / "losses.jsonl"))
    _check_writable("--checkpoint", directory and Path(directory))
    _check_writable("--log", log and Path(log).parent)
    if args.compare is not None:
        _check_writable("--compare", Path(args.compare).parent)
        if importlib.util.find_spec("matplotlib") is None:
            raise BadInput("--compare needs matplotlib: pip install 'spmd-moe[plot]'")
    if args.port is not None and world is None:
        check_port(args.port)
    return Job(
        recipe=recipe, parallel=parallel, steps=args.steps, checkpoint=directory,
        save_every=args.save_every, keep=args.keep, resume=resume and str(resume),
        verify_every=args.verify, compare=args.compare, log=log, timeout=args.timeout,
    )  # fmt: skip


def _check_processes(
    parallel: Parallel, args: argparse.Namespace, world: World | None
) -> None:
    ranks = parallel.num_ranks
    if args.processes not in (None, ranks):
        found = f"--processes is {args.processes}"
    elif world is not None and world.size != ranks:
        found = f"this job has {world.size}"
    else:
        return
    raise BadInput(
        f"--mesh {print_parallel(parallel)} is for {ranks} (dp * cp * tp) processes, but "
        f"{found}: change the degrees or the number of processes"
    )


def _checkpoint_to_resume(args: argparse.Namespace) -> Path | None:
    if args.checkpoint is None:
        if args.resume:
            raise BadInput("--resume needs --checkpoint DIR, the directory of the run")
        return None
    found = checkpoints_in(Path(args.checkpoint))
    if args.resume and not found:
        raise BadInput(
            f"{args.checkpoint} has no complete checkpoint: start without --resume, or "
            "name the directory of the run"
        )
    if found and not args.resume:
        raise BadInput(
            f"{args.checkpoint} has a run in it ({found[-1].name}): continue it with "
            "--resume, or name another directory"
        )
    return found[-1] if found else None


def _check_writable(option: str, directory: Any) -> None:
    if not directory:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise BadInput(
            f"{option}: cannot write in {directory} ({error.strerror}): name another place"
        ) from None


def _told(error: Exception, world: World | None) -> str:
    if isinstance(error, RankFailed | LossesDiffer):
        return str(error)
    return ("" if world is None else f"rank {world.rank}: ") + told(error)


def _hint(job: Job) -> str:
    """How to go on after a failure."""
    found = checkpoints_in(job.directory) if job.directory is not None else []
    if not found or step_of(found[-1]) >= job.steps:
        return ""
    return f"\n  continue from {found[-1]} with --resume"
