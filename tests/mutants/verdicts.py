"""One mutant tried in a worker process: which law kills it.

A law kills only if it holds on the tables as they are; that is tried once for each law
that fails on a mutant, in every worker.
"""

import functools
import time
from dataclasses import dataclass

import torch

from tests.mutants.equivalent import why_equivalent
from tests.mutants.killers import Killer, first_failure, patient, prepare
from tests.mutants.mutant import Mutant
from tests.mutants.patches import changed
from tests.mutants.tables import mutants


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant; `broken`: laws that fail without it, too."""

    name: str
    table: str
    killer: str
    message: str
    seconds: float
    broken: tuple[str, ...]

    @property
    def is_killed(self) -> bool:
        return bool(self.killer)


@functools.cache
def failure_unmutated(killer: Killer) -> str:
    """The message of a law that fails on the tables as they are; empty if it holds."""
    found = first_failure([killer])
    return "" if found is None else found[1]


@functools.cache
def _by_name() -> dict[str, Mutant]:
    return {mutant.name: mutant for mutant in mutants()}


def try_mutant(name: str) -> Verdict:
    """The first law that holds without the mutant and fails with it."""
    start = time.perf_counter()
    torch.set_num_threads(1)
    mutant = _by_name()[name]
    laws = list(dict.fromkeys(mutant.killers))
    if why_equivalent(name) is None:
        laws += patient(laws)
    killed_by, message, broken = "", "", []
    for killer in laws:
        prepare(killer)
        try:
            with changed(mutant.apply):
                found = first_failure([killer])
        except LookupError as error:  # the code no longer says what the mutant changes
            message = f"STALE: {error}"
            break
        if found is None:
            continue
        _, message = found
        said = failure_unmutated(killer)
        if not said:
            killed_by = " ".join(killer).strip()
            break
        broken.append(f"{' '.join(killer)}: {said}")
    spent = time.perf_counter() - start
    return Verdict(name, mutant.table, killed_by, message, spent, tuple(broken))
