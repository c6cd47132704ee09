"""Run one rank of a job in a process of its own, which the launcher starts.

The command line of the process is the job as JSON, and `--debug` if it is asked for.
"""

import os
import sys
import threading
import time

from rich.console import Console

from spmd_moe.training.errors import EXIT_STOPPED, Stopped
from spmd_moe.training.job import job_from_json
from spmd_moe.training.launch import LAUNCHER, report


def main(console: Console) -> None:
    """Train as this rank; report what goes wrong to the launcher, which tells it once."""
    launcher = int(os.environ[LAUNCHER])
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    from spmd_moe.training.loop import train  # the launcher does not need it
    from spmd_moe.training.world import given_world

    job, debug = job_from_json(sys.argv[1]), "--debug" in sys.argv[2:]
    world = given_world(os.environ)
    assert world is not None
    try:
        train(job, world, console)
    except Exception as error:
        report(error)
        if debug and not isinstance(error, Stopped):
            raise
        sys.stdout.flush()
        # Not sys.exit: threads of the process group may wait for ranks that are gone.
        os._exit(EXIT_STOPPED if isinstance(error, Stopped) else 1)


def _end_with(launcher: int) -> None:
    """End this rank when the launcher has ended, where the system does not do it."""
    while os.getppid() == launcher:
        time.sleep(0.5)
    os._exit(1)
