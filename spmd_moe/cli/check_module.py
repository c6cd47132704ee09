"""`spmd-moe check --module`: what was checked of a module of one's own, told."""

import argparse
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console

from placements import PlacementError
from placements.testing.compare.case import OF_REFERENCE
from placements.testing.ranks.crashes import CheckerCrash, check_judged
from placements.testing.ranks.failures import RankFailure, shown_line
from spmd_moe.cli import check_json, legends
from spmd_moe.cli.crash import told
from spmd_moe.cli.degrees import parse_mesh
from spmd_moe.cli.forward_hints import line_of_forward
from spmd_moe.cli.own_module import OwnModule, own_module
from spmd_moe.cli.progress import progress
from spmd_moe.cli.run_own_module import (
    Checked,
    check_gradients,
    check_reference,
    check_types,
    check_values,
    run_plainly,
)
from spmd_moe.cli.show_crossings import show_crossings
from spmd_moe.cli.tables import say
from spmd_moe.cli.terminal import BadInput
from spmd_moe.cli.user_code import blamed

SAID = {
    "types": "every op fits",
    "values": "on simulated ranks they are what the types say",
    "gradients": "the backward is the adjoint of the forward, for every input",
    "reference": "results and gradients are those of one device",
}

# After the types: what each check is called, and what makes it.
CHECKS: dict[str, Callable[[OwnModule, Checked], None]] = {
    "values": check_values,
    "gradients": check_gradients,
    "reference": check_reference,
}


FAILURES = (PlacementError, RankFailure, AssertionError, CheckerCrash)


@dataclass
class _Outcome:
    """What the types said, the checks that passed, and what the next one said."""

    types: Checked | None = None
    done: list[str] = field(default_factory=list[str])
    failure: str | None = None
    code: int = 0


def run_module(args: argparse.Namespace, console: Console) -> int:
    """0 if all checks pass, 1 if one fails, 3 if the checker itself does."""
    own = own_module(args.module, None if args.mesh is None else parse_mesh(args.mesh))
    outcome = _Outcome()
    try:
        _check(own, outcome)
    except FAILURES as error:
        if args.debug:
            raise
        outcome.failure, outcome.code = told(error, AssertionError, RankFailure)
        if isinstance(error, AssertionError):  # of a comparison, which has no line
            line = shown_line(line_of_forward(own.cls))
            outcome.failure += f"\n  in {own.cls.__name__}.forward ({line})"
    if args.json:
        _print_json(own, outcome)
    else:
        _show(console, own, outcome)
    return outcome.code


def _check(own: OwnModule, outcome: _Outcome) -> None:
    names = [name for name in SAID if name != "reference" or own.reference is not None]
    with progress(names, "checking", len(names)) as shown:
        for name in shown:
            if name == "gradients" and outcome.types and not outcome.types.smooth:
                continue  # integers alone: there are none
            if outcome.types is None:
                with blamed(own.name, own.cls, PlacementError, CheckerCrash), _judged(own):
                    outcome.types = check_types(own)
            else:
                with blamed(own.name, own.cls, *FAILURES), _judged(own, AssertionError):
                    CHECKS[name](own, outcome.types)
            outcome.done.append(name)


@contextmanager
def _judged(own: OwnModule, *promised: type[Exception]) -> Generator[None]:
    """CheckerCrash for what neither a check promises nor the module raises by itself."""
    try:
        yield
    except (BadInput, *promised):
        raise
    except Exception as error:
        if OF_REFERENCE not in getattr(error, "__notes__", ()):
            check_judged(error, lambda: run_plainly(own))
        raise


def _print_json(own: OwnModule, outcome: _Outcome) -> None:
    types = outcome.types
    check_json.print_report(
        "module",
        outcome.failure is None,
        failure=outcome.failure,
        module=own.name,
        mesh=own.mesh,
        crossings=[check_json.of_crossing(row) for row in types.crossings] if types else [],
        collectives=check_json.of_entries(types.collectives) if types else [],
        checked=outcome.done,
    )


def _show(console: Console, own: OwnModule, outcome: _Outcome) -> None:
    if outcome.types is not None:
        sizes = ",".join(f"{axis}={size}" for axis, size in own.mesh.items())
        title = f"{own.name} on {sizes}, as rank 0 sees it"
        show_crossings(console, title, outcome.types.crossings)
        say(console, f"{legends.CROSSINGS}\n")
    for name in outcome.done:
        say(console, f"{name + ':':<11} {SAID[name]}")
    if outcome.failure is not None:
        print(outcome.failure, file=sys.stderr)
    elif own.reference is None:
        say(console, "reference:  none; a staticmethod `reference` would be compared")
