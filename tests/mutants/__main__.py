"""`python -m tests.mutants`: flip every row of every table, and count what the laws find.

Exit status 1 if a survivor is not explained, or if a law fails on the tables as they are.
"""

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed

from rich.console import Console
from rich.table import Table

from tests.mutants.equivalent import why_equivalent
from tests.mutants.mutant import Mutant
from tests.mutants.tables import mutants
from tests.mutants.verdicts import Verdict, try_mutants


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="name every killer")
    options = parser.parse_args()
    chosen = [m for m in mutants() if options.only in m.name]
    start = time.perf_counter()
    # A process that is killed breaks this pool; multiprocessing.Pool would wait for it.
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, spawned) as pool:
        waiting = [pool.submit(try_mutants, names) for names in _by_row(chosen)]
        found = (verdict for done in as_completed(waiting) for verdict in done.result())
        verdicts = _followed(found, len(chosen), options.verbose)
    order = {mutant.name: k for k, mutant in enumerate(chosen)}
    verdicts.sort(key=lambda verdict: order[verdict.name])
    console = Console(width=120, highlight=False)
    console.print(_summary(chosen, verdicts))
    unexplained = _name_survivors(console, verdicts)
    broken = {law.partition(": ")[0]: law for v in verdicts for law in v.broken}
    for law in broken.values():
        console.print(f"UNMUTATED, yet it fails: {law}", markup=False)
    killed = sum(v.is_killed for v in verdicts)
    explained = len(verdicts) - killed - unexplained
    console.print(
        f"killed {killed}/{len(verdicts)}, equivalent {explained}, survivors {unexplained}; "
        f"laws that fail without a mutant {len(broken)}; "
        f"{time.perf_counter() - start:.0f} s"
    )
    return 1 if unexplained or broken else 0


def _by_row(chosen: list[Mutant]) -> list[list[str]]:
    """The names of mutants that share a row of a table, so that one worker has them."""
    rows: dict[str, list[str]] = {}
    for mutant in chosen:
        row = mutant.row.partition(",")[0] if mutant.table == "roles" else mutant.row
        rows.setdefault(f"{mutant.table} {row}", []).append(mutant.name)
    return list(rows.values())


def _followed(found: Iterable[Verdict], total: int, verbose: bool) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for verdict in found:
        verdicts.append(verdict)
        if verbose:
            state = f"killed by {verdict.killer}" if verdict.is_killed else "SURVIVES"
            line = f"{len(verdicts)}/{total} {verdict.name}: {state}"
            print(f"{line}, {verdict.seconds:.1f} s: {verdict.message[:100]}", flush=True)
    return verdicts


def _summary(chosen: list[Mutant], verdicts: list[Verdict]) -> Table:
    table = Table(title="Mutants", title_justify="left")
    for column in ("table", "mutants", "killed", "equivalent", "survivors", "killed by"):
        table.add_column(column, justify="left" if column.endswith(("e", "y")) else "right")
    for name in dict.fromkeys(m.table for m in chosen):
        own = [v for v in verdicts if v.table == name]
        killers = Counter(v.killer.partition(" ")[0] for v in own if v.is_killed)
        alive = [v.name for v in own if not v.is_killed]
        equal = sum(why_equivalent(n) is not None for n in alive)
        counts = (len(own), len(own) - len(alive), equal, len(alive) - equal)
        by = ", ".join(f"{law} {count}" for law, count in killers.most_common())
        table.add_row(name, *map(str, counts), by)
    return table


def _name_survivors(console: Console, verdicts: list[Verdict]) -> int:
    unexplained = 0
    for verdict in verdicts:
        if verdict.is_killed:
            continue
        reason = why_equivalent(verdict.name)
        unexplained += reason is None
        state = "SURVIVES" if reason is None else "equivalent"
        reason = verdict.message if verdict.message.startswith("STALE") else reason
        said = f"\n    {reason}" if reason else ""
        console.print(f"{state}: {verdict.name}{said}", markup=False)
    return unexplained


if __name__ == "__main__":
    sys.exit(main())
