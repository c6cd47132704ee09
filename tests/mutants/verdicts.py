"""One mutant, or one law, tried in a worker process."""

import time
from dataclasses import dataclass

import torch

from tests.mutants.killers import Killer, killer_of
from tests.mutants.patches import changed
from tests.mutants.tables import mutants


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant, or of one law on the tables as they are."""

    name: str
    table: str
    killer: str
    message: str
    seconds: float

    @property
    def is_killed(self) -> bool:
        return bool(self.killer)


def try_law(killer: Killer) -> Verdict:
    """A law on the tables as they are: it must hold."""
    start = time.perf_counter()
    torch.set_num_threads(1)
    found = killer_of([killer]) or ("", "")
    return Verdict(" ".join(killer).strip(), "", *found, time.perf_counter() - start)


def try_mutant(name: str, broken: frozenset[Killer] = frozenset()) -> Verdict:
    """The laws of one mutant, without those that fail anyway."""
    start = time.perf_counter()
    torch.set_num_threads(1)
    mutant = next(m for m in mutants() if m.name == name)
    laws = list(dict.fromkeys(k for k in mutant.killers if k not in broken))
    with changed(mutant.apply):
        found = killer_of(laws) or ("", "")
    return Verdict(name, mutant.table, *found, time.perf_counter() - start)


def try_pair(pair: tuple[str, frozenset[Killer]]) -> Verdict:
    return try_mutant(*pair)
