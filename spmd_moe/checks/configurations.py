"""Check the layer in its configurations: types on the mesh, numbers on simulated ranks."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from placements.runtime.ledger import Entry
from spmd_moe.checks.scale import fits, scaled_down
from spmd_moe.checks.simulate import Simulated, simulate
from spmd_moe.checks.trace import Trace, Workload, trace
from spmd_moe.config import MoEConfig, Parallel, check_together
from spmd_moe.layouts import CONFIGURATIONS


@dataclass(frozen=True)
class Result:
    """One configuration: its trace, and its run if there was one."""

    trace: Trace
    run: Simulated | None
    sent_otherwise: tuple[str, ...] = ()  # what that run sent and its trace does not say

    @property
    def passed(self) -> bool:
        return self.run is None or (self.run.agrees and not self.sent_otherwise)


@dataclass(frozen=True)
class Configurations:
    """The configurations of the layer on some ranks, and why the others are left out."""

    found: dict[str, Parallel]
    left_out: dict[str, str]


def all_configurations(config: MoEConfig, degrees: Parallel) -> Configurations:
    """Find every configuration of the layer on these ranks; tp and ep are above 1."""
    cuts = ((degrees.ep, 1), (1, 1), (degrees.ep, degrees.tp))
    tried = [(ep, etp, sp) for ep, etp in cuts for sp in (True, False)]
    found: dict[str, Parallel] = {}
    left_out: dict[str, str] = {}
    for name, (ep, etp, sp) in zip(CONFIGURATIONS, tried, strict=True):
        try:
            made = replace(degrees, ep=ep, etp=etp, sequence_parallel=sp)
            check_together(config, made)
            found[name] = made
        except ValueError as error:
            left_out[name] = str(error)
    return Configurations(found, left_out)


def check_layer(
    config: MoEConfig, parallels: Iterable[Parallel], work: Workload, *, scale_down: bool
) -> list[Result]:
    """Check and, where the layer fits or is scaled down, run every configuration."""
    results: list[Result] = []
    for parallel in parallels:
        found = trace(config, parallel, work)
        small = None
        if scale_down or fits(config, parallel, work):
            small = scaled_down(config, parallel, work)
        if small is None:
            results.append(Result(found, None))
        else:
            run = simulate(*small)
            results.append(Result(found, run, sent_otherwise(run, trace(*small))))
    return results


def sent_otherwise(run: Simulated, traced: Trace) -> tuple[str, ...]:
    """Say where rank 0 and its trace differ; rows of all-to-alls depend on the data."""
    said = _fixed(traced.collectives, traced.gradient_sums)
    sent = _fixed(run.sent, run.gradient_sums)
    return (
        *(f"{count} x {what} traced, not sent" for what, count in (said - sent).items()),
        *(f"{count} x {what} sent, not traced" for what, count in (sent - said).items()),
    )


def _fixed(step: Iterable[Entry], gradient_sums: Iterable[Entry]) -> Counter[str]:
    """Count the collectives of each kind and size."""
    phases = [*((e, " in backward" if e.backward else "") for e in step)]
    phases += [(e, " of gradients") for e in gradient_sums]
    return Counter(
        f"{e.kind} {e.axis}{'' if e.kind == 'all-to-all' else f' {e.nbytes} B'}{phase}"
        for e, phase in phases
    )
