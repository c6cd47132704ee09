"""Judge many models in several processes. Processes import this file, and not the command."""

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from tests.models.architectures import Architecture
from tests.models.causes import Cause, causes
from tests.models.judge import Setting, Verdict, judge

Job = tuple[Architecture, Setting]
T = TypeVar("T")


def run_jobs(work: Callable[[Job], T], jobs: Iterable[Job], processes: int) -> Iterator[T]:
    """Yield the results of all jobs, in order, as they come."""
    with multiprocessing.get_context("spawn").Pool(processes, _begin) as pool:
        yield from pool.imap(work, jobs)


def _begin() -> None:
    warnings.simplefilter("ignore")  # of transformers, which is not under test
    torch.set_num_threads(1)


def timed_verdict(job: Job) -> tuple[Verdict, float]:
    """Judge a model; also return how many seconds that took."""
    begin = time.perf_counter()
    return judge(*job), time.perf_counter() - begin


def all_causes(job: Job) -> list[Cause]:
    """Return every refusal of a model."""
    return causes(*job)
