"""Compare every way to cut one layer over so many ranks: what each sends and keeps.

Each mesh is type-checked on meta tensors; bytes and memory are read from that trace. All
meshes do the same work: as many sequences as there are ranks, times `--batch`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from placements.runtime.ledger import Entry
from spmd_moe.checks.errors import BadInput
from spmd_moe.checks.scale import divisors
from spmd_moe.checks.trace import Memory, Workload, trace
from spmd_moe.config import MoEConfig, Parallel, check_together

# What is compared in 10 seconds: a mesh takes some 35 ms, and more on many ranks.
MOST_RANKS = 256
MOST_MESHES = 210  # all meshes of 256 ranks; 240 ranks can have more
_ONE_BY_ONE = "check the meshes that you think of one by one, by --mesh"


@dataclass(frozen=True)
class Candidate:
    """One mesh: the bytes that a rank puts on the wire in one step, and its memory."""

    parallel: Parallel
    forward: float
    backward: float
    gradient_sums: float
    memory: Memory

    @property
    def sent(self) -> float:
        return self.forward + self.backward + self.gradient_sums


def feasible(config: MoEConfig, ranks: int, cp: int) -> list[Parallel]:
    """Return all degrees that make up `ranks` and into which the layer can be cut."""
    if ranks > MOST_RANKS:
        raise BadInput(
            f"--ranks {ranks}: at most {MOST_RANKS} are compared, as more would take "
            f"long; {_ONE_BY_ONE}"
        )
    if ranks < 1 or ranks % cp:
        raise BadInput(f"--ranks {ranks}: must be a multiple of cp ({cp}), at least 1")
    found: list[Parallel] = []
    for tp, ep in product(divisors(ranks // cp), divisors(ranks)):
        for etp, sp in product(sorted({1, tp if ep > 1 else 1}), (False, True)):
            if sp and tp == 1:
                continue
            try:
                parallel = Parallel(
                    dp=ranks // cp // tp, cp=cp, tp=tp, ep=ep, etp=etp, sequence_parallel=sp
                )
                check_together(config, parallel)
            except ValueError:
                continue
            found.append(parallel)
    if len(found) > MOST_MESHES:
        raise BadInput(
            f"--ranks {ranks}: there are {len(found)} meshes, and at most "
            f"{MOST_MESHES} are compared, as more would take long; {_ONE_BY_ONE}"
        )
    return found


def compare(
    config: MoEConfig, parallels: Iterable[Parallel], work: Workload
) -> Iterator[Candidate]:
    """Check each mesh; `work.batch` is for each rank, so that all meshes do the same."""
    for parallel in parallels:
        here = replace(work, batch=work.batch * parallel.num_ranks // parallel.dp)
        found = trace(config, parallel, here)
        sizes = {**parallel.dense_mesh(), **parallel.sparse_mesh()}
        yield Candidate(
            parallel,
            sum(on_wire(e, sizes[e.axis]) for e in found.collectives if not e.backward),
            sum(on_wire(e, sizes[e.axis]) for e in found.collectives if e.backward),
            sum(on_wire(e, sizes[e.axis]) for e in found.gradient_sums),
            found.memory,
        )


def on_wire(entry: Entry, ranks: int) -> float:
    """Count the bytes that one rank sends for a collective, by ring or direct exchange."""
    share = (ranks - 1) / ranks
    factor = {
        "all-reduce": 2 * share,  # reduce-scatter, then all-gather
        "reduce-scatter": share,
        "all-to-all": share,  # all but its own rows
        "all-gather": ranks - 1.0,  # its piece, to or past every other rank
    }[entry.kind]
    return factor * entry.nbytes


def best_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sort by memory, least first; of equal memory, by what is sent."""
    return sorted(candidates, key=lambda c: (c.memory.total, c.sent))
