"""Run one rank of a job in a process of its own, which the launcher starts.

The command line of the process is the job as JSON, and `--debug` if it is asked for.
"""

import os
import sys
import threading
import time

from rich.console import Console

from spmd_moe.training.job import job_from_json
from spmd_moe.training.launch import report


def main(console: Console) -> None:
    """Train as this rank; report what goes wrong to the launcher, which tells it once."""
    from spmd_moe.training.loop import train  # the launcher does not need it
    from spmd_moe.training.world import given_world

    job, debug = job_from_json(sys.argv[1]), "--debug" in sys.argv[2:]
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    world = given_world(os.environ)
    assert world is not None
    try:
        train(job, world, console)
    except Exception as error:
        report(error)
        if debug:
            raise
        sys.stdout.flush()
        os._exit(1)  # threads of the process group may be waiting for ranks that are gone


def _end_with(parent: int) -> None:
    """End this rank when the process that started it has ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
