"""One mutant tried in a worker process: which law kills it.

A law kills only if it holds on the tables as they are; that is tried once for each law
that fails on a mutant, in every worker.
"""

import functools
import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.mutants.equivalent import why_equivalent
from tests.mutants.killers import Killer, first_failure, patient, prepare
from tests.mutants.known_forms import failure_of
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
    if killer[0] == "forms":
        return failure_of(killer[1])
    found = first_failure([killer])
    return "" if found is None else found[1]


@functools.cache
def _by_name() -> dict[str, Mutant]:
    return {mutant.name: mutant for mutant in mutants()}


def try_mutant(name: str) -> Verdict:
    """The first law that holds without the mutant and fails with it."""
    torch.set_num_threads(1)
    return _tried(_by_name()[name])


def _tried(mutant: Mutant) -> Verdict:
    start, name = time.process_time(), mutant.name
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
    spent = time.process_time() - start
    return Verdict(name, mutant.table, killed_by, message, spent, tuple(broken))


def try_mutants(names: Sequence[str]) -> list[Verdict]:
    """Several in a row, since mutants of one row share the forms of its ops.

    Torch does not look at all shapes, and a mutant may hand it pieces that do not fit. If
    the process crashes so in a mutant, and once more in a process for that mutant alone,
    the mutant is noticed.
    """
    found: list[Verdict] = []
    while len(found) < len(names):
        found += _tried_apart(names[len(found) :])
        if len(found) < len(names):
            name = names[len(found)]
            message = "torch crashes in what is accepted"
            crash = Verdict(name, _by_name()[name].table, "crash", message, 0.0, ())
            found += _tried_apart([name]) or [crash]
    return found


def _tried_apart(names: Sequence[str]) -> list[Verdict]:
    """The verdicts of a process of their own, up to the mutant in which it crashes."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(write, "wb") as out:
            for name in names:
                pickle.dump(try_mutant(name), out)
                out.flush()
        os._exit(0)
    os.close(write)
    found: list[Verdict] = []
    with os.fdopen(read, "rb") as said:
        while len(found) < len(names):
            try:
                found.append(pickle.load(said))
            except (EOFError, pickle.UnpicklingError):
                break
    _, status = os.waitpid(child, 0)
    if len(found) < len(names) and not os.WIFSIGNALED(status):
        raise RuntimeError(f"{names[len(found)]}: its process ended with status {status}")
    return found
