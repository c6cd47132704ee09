"""One process of `spmd-moe train`: `python -c START JOB`, by the launcher."""

import os
import sys
import threading
import time

from spmd_moe.cli.terminal import make_console
from spmd_moe.training.job import Job, job_from_json
from spmd_moe.training.launch import report

# The launcher stops its ranks: Ctrl-C, which a terminal sends to all, is for it alone.
START = """\
import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)
from spmd_moe.cli.train_rank import main; main()"""


def arguments_of(job: Job, *, debug: bool) -> list[str]:
    """What Python is given to be a rank of `job`."""
    return ["-c", START, job.to_json(), *(["--debug"] if debug else [])]


def main() -> None:
    """What goes wrong is told to the launcher, which tells it once."""
    from spmd_moe.training.loop import train  # the launcher does not need it
    from spmd_moe.training.world import given_world

    job, debug = job_from_json(sys.argv[1]), "--debug" in sys.argv[2:]
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    world = given_world(os.environ)
    assert world is not None
    try:
        train(job, world, make_console())
    except Exception as error:
        report(error)
        if debug:
            raise
        sys.stdout.flush()
        os._exit(1)  # threads of the process group may be waiting for ranks that are gone


def _end_with(parent: int) -> None:
    """No rank outlives the process that started it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
