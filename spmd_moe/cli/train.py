"""`spmd-moe train`: a small language model on local processes, or inside a job."""

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

from spmd_moe.checks.errors import BadInput
from spmd_moe.cli.degrees import SYNTAX
from spmd_moe.cli.train_options import make_job, option_of
from spmd_moe.training.errors import EXIT_STOPPED, RunError, Stopped, Unusable
from spmd_moe.training.job import Job
from spmd_moe.training.launch import launch, message_of
from spmd_moe.training.manifest import checkpoints_in, step_of
from spmd_moe.training.recipe import DTYPES, FIELDS, Recipe
from spmd_moe.training.world import ALONE, World, given_world

EXAMPLES = """\
examples:
  spmd-moe train                                   one process, 200 steps
  spmd-moe train --mesh dp=2,tp=2,ep=2,sp=on       four processes, by torch's launcher
  spmd-moe train --mesh tp=2,ep=2 --compare        the one-device twin beside it, and a plot
  spmd-moe train --mesh tp=2 --verify 10           types and values checked every 10 steps
  spmd-moe train --mesh dp=2,ep=2 --fsdp --compile aot_eager
  spmd-moe train --mesh dp=2,tp=2,ep=2 --checkpoint run
  spmd-moe train --mesh tp=2 --checkpoint run --resume --steps 400      on another mesh
  torchrun --nproc-per-node 4 -m spmd_moe train --mesh dp=2,tp=2,ep=2   inside a job
  srun --ntasks 4 spmd-moe train --mesh dp=2,tp=2,ep=2                  inside Slurm

The losses do not depend on the mesh. A run that was killed is continued from its last
complete checkpoint with the same command and --resume.
"""

# What a process runs to be a rank.
START = """\
from spmd_moe.cli.terminal import make_console
from spmd_moe.training.rank import main; main(make_console())"""

CLEAN_LINE = (
    ControlType.CARRIAGE_RETURN,
    (ControlType.ERASE_IN_LINE, 2),
    ControlType.SHOW_CURSOR,
)

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
    add("--fsdp", action="store_true",
        help="shard parameters, gradients and moments over dp and edp, by FSDP2")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND",
        help="compile the blocks by torch.compile (%(const)s); checked steps are not")
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
            option_of(name), dest=name, metavar={"dtype": "NAME"}.get(name, "N"),
            type={"lr": float, "dtype": str}.get(name, int),
            help=f"{HELP[name]} ({getattr(Recipe(), name)})",
        )
# fmt: on


def run(args: argparse.Namespace, console: Console) -> int:
    world = None
    try:
        world = given_world(os.environ, args.port)
        with ExitStack() as held:
            _train(make_job(args, world, held), world, args, console)
        return 0
    except (BadInput, Unusable) as error:
        if _is_told_by_another(world) and not args.debug:
            return 2
        raise BadInput(str(error)) from error
    except Stopped as stopped:
        if not _is_told_by_another(world):
            print(f"spmd-moe train: {stopped}{_hint(args)}", file=sys.stderr)
        return EXIT_STOPPED
    except (RunError, RuntimeError, OSError) as error:
        if args.debug:
            raise
        of_rank = None if isinstance(error, RunError) else world
        rank = "" if of_rank is None else f"rank {of_rank.rank}: "
        print(f"spmd-moe train: {rank}{message_of(error)}{_hint(args)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if args.debug:
            raise
        if not _is_told_by_another(world):
            print(f"spmd-moe train: interrupted{_hint(args)}", file=sys.stderr)
        return 130


def _is_told_by_another(world: World | None) -> bool:
    """Return whether another rank prints the error: rank 0 says what all ranks find."""
    return world is not None and world.rank != 0


def _train(
    job: Job, world: World | None, args: argparse.Namespace, console: Console
) -> None:
    ranks = job.parallel.num_ranks
    if world is not None or ranks == 1:
        from spmd_moe.training.loop import train  # the launcher does not need it

        train(job, world or ALONE, console)
    else:
        console.print(f"Starting {ranks} processes ({job.mesh}) ...", highlight=False)
        arguments = [job.to_json(), *(["--debug"] if args.debug else [])]
        try:
            launch(START, arguments, ranks, args.port, job.timeout)
        finally:  # a rank that is stopped leaves its progress bar
            Console(stderr=True).control(Control(*CLEAN_LINE))


def _hint(args: argparse.Namespace) -> str:
    """Say how to go on after a failure."""
    found = [] if args.checkpoint is None else checkpoints_in(Path(args.checkpoint))
    if not found or step_of(found[-1]) >= args.steps:
        return ""
    return f"\n  continue from {found[-1]} with --resume"
