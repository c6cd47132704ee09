"""The check of the layer: its types on the mesh, then its numbers on simulated ranks."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from placements.ledger import Entry
from spmd_moe.cli.progress import progress
from spmd_moe.cli.scale import fits, scaled_down
from spmd_moe.cli.simulate import Simulated, simulate
from spmd_moe.cli.trace import Trace, Workload, trace
from spmd_moe.config import MoEConfig, Parallel, check_together
from spmd_moe.layouts import CONFIGURATIONS, configuration


@dataclass(frozen=True)
class Result:
    """One configuration: its trace, and its run if there was one."""

    trace: Trace
    run: Simulated | None

    @property
    def passed(self) -> bool:
        return self.run is None or (self.run.agrees and sent_as_traced(self.run))


def all_configurations(config: MoEConfig, degrees: Parallel) -> list[Parallel]:
    """Every configuration of the layer on these ranks, as far as it can be cut so."""
    found: dict[str, Parallel] = {}
    for ep, etp in ((degrees.ep, 1), (1, 1), (degrees.ep, degrees.tp)):
        for sp in (True, False):
            try:
                made = replace(degrees, ep=ep, etp=etp, sequence_parallel=sp)
                check_together(config, made)
            except ValueError:
                continue
            found.setdefault(configuration(made), made)
    return [found[name] for name in CONFIGURATIONS if name in found]


def check_layer(
    config: MoEConfig, parallels: Sequence[Parallel], work: Workload, *, scale_down: bool
) -> list[Result]:
    """Check and, where the layer fits or is scaled down, run every configuration."""
    results: list[Result] = []
    for parallel in progress(parallels, "checking", len(parallels)):
        found = trace(config, parallel, work)
        small = None
        if scale_down or fits(config, parallel, work):
            small = scaled_down(config, parallel, work)
        results.append(Result(found, None if small is None else simulate(*small)))
    return results


def sent_as_traced(run: Simulated) -> bool:
    """Whether rank 0 sent what its trace says; rows of all-to-alls depend on the data."""
    traced = trace(run.config, run.parallel, run.work)
    return _fixed(traced.collectives) == _fixed(run.sent) and (
        _fixed(traced.gradient_sums) == _fixed(run.gradient_sums)
    )


def _fixed(entries: Iterable[Entry]) -> Counter[tuple[str, str, bool, int]]:
    return Counter(
        (e.axis, e.kind, e.backward, 0 if e.kind == "all-to-all" else e.nbytes)
        for e in entries
    )
