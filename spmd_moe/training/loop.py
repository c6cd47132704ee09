"""Run a rank of a training run, from joining the others to the summary."""

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from placements import typecheck, verify
from spmd_moe.training import checkpoints, manifest
from spmd_moe.training.errors import Stopped
from spmd_moe.training.job import Job
from spmd_moe.training.losses import (
    Loss,
    LossLog,
    check_equal,
    first_without_number,
    largest_difference,
)
from spmd_moe.training.plot import plot_losses
from spmd_moe.training.stopping import heeding_sigterm, ranks_asked, say_stopped
from spmd_moe.training.trainer import Trainer, one_device
from spmd_moe.training.world import World, joined, meshes_of, wait_for_all


def train(job: Job, world: World, console: Console) -> None:
    """Train on this rank; rank 0 says how it went."""
    with heeding_sigterm() as is_asked, joined(world, job.timeout):
        meshes = meshes_of(job.parallel, job.timeout)
        trainer = Trainer(
            job.recipe, job.parallel, *meshes, fsdp=job.fsdp, backend=job.backend
        )
        compares = job.compare is not None and world.rank == 0
        twin = one_device(job.recipe) if compares else None
        start = _resume(job, trainer, twin)
        path = Path(job.log) if job.log is not None and world.rank == 0 else None
        with LossLog(path, start) as log, _progress(job, world, start) as show:
            began = time.monotonic()
            step, asked = start, ranks_asked(is_asked())  # perhaps before it began
            while step < job.steps and not asked:
                step += 1
                loss = trainer.step(step, _checking(job, step, start))
                beside = None if twin is None else twin.step(step, nullcontext())
                log.add(Loss(step, loss, beside))
                show(loss)
                asked = ranks_asked(is_asked())
                if job.directory is not None and (asked or _is_due(job, step)):
                    checkpoints.save(
                        trainer, job.directory, step, mesh=job.mesh, keep=job.keep
                    )
            seconds = time.monotonic() - began
        if world.rank == 0 and step > start:
            console.print(_summary(job, trainer, log.losses, (start, step), seconds))
        wait_for_all()  # nobody leaves while another rank still receives
    if job.compare is not None and world.rank == 0 and step > start:
        plot_losses(log.losses, Path(job.compare), job.mesh)
        check_equal(log.losses, job.recipe.dtype)
    if step < job.steps:
        saved = job.directory is not None or step == 0
        raise Stopped(say_stopped(asked, world.size, step, saved=saved))


def _resume(job: Job, trainer: Trainer, twin: Trainer | None) -> int:
    """Load the checkpoint to resume; return how many steps it has behind it."""
    if job.resume is None:
        return 0
    path = Path(job.resume)
    step = manifest.step_of(path)
    checkpoints.load(trainer, path)
    if twin is not None:
        checkpoints.load(twin, path)
    return step


def _checking(job: Job, step: int, start: int) -> AbstractContextManager[Any]:
    if job.verify_every and step % job.verify_every == 0:
        return verify()
    return typecheck() if step == start + 1 else nullcontext()


def _is_due(job: Job, step: int) -> bool:
    return step == job.steps or (job.save_every > 0 and step % job.save_every == 0)


@contextmanager
def _progress(job: Job, world: World, start: int) -> Generator[Callable[[float], None]]:
    """Show a bar of rank 0 if stderr is a terminal; call it with the loss of each step."""
    console = Console(stderr=True)
    if world.rank != 0 or not console.is_terminal:
        yield lambda loss: None
        return
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=job.steps, completed=start, loss=float("nan"))
        yield lambda loss: progress.update(task, advance=1, loss=loss)


def _diverged(losses: list[Loss]) -> str:
    first = first_without_number(losses)
    return "" if first is None else f", not a number from step {first.step} on"


def _summary(
    job: Job,
    trainer: Trainer,
    losses: list[Loss],
    between: tuple[int, int],
    seconds: float,
) -> Table:
    start, end = between
    recipe, done = job.recipe, end - start
    checked = f"types at step {start + 1}"
    if job.verify_every:
        times = end // job.verify_every - start // job.verify_every
        checked += f", types and values every {job.verify_every} steps ({times} times)"
    rows = {
        "mesh": job.mesh,
        "processes": str(job.parallel.num_ranks),
        "model": f"{trainer.num_parameters():,} parameters, {recipe.dtype}",
        "steps": f"{start + 1} to {end}",
        "loss": f"{losses[-done].loss:.6f} -> {losses[-1].loss:.6f}{_diverged(losses)}",
        "time": f"{seconds:.1f} s, {done * recipe.batch * recipe.seq_len / seconds:,.0f} "
        "tokens per second",
        "checked": checked,
    }
    if job.backend is not None:
        rows["compiled"] = f"the blocks, by {job.backend}, where nothing is checked"
    if job.directory is not None:
        rows["checkpoint"] = str(job.directory / manifest.name_of(end))
    if job.log is not None:
        rows["losses"] = job.log
    if job.compare is not None:
        worst, at = largest_difference(losses)
        rows["one device"] = f"largest relative difference {worst:.1e}, at step {at}"
        rows["plot"] = job.compare
    table = Table(show_header=False, title="Trained", title_justify="left")
    for name, said in rows.items():
        table.add_row(name, Text(said))
    return table
