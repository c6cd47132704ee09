"""`spmd-moe check --module`: check a module of the user's, and print what was found."""

import argparse
import sys

from rich.console import Console

from placements.testing import RankFailure
from placements.testing.ranks.failures import shown_line
from spmd_moe.checks.module.hints import line_of_forward
from spmd_moe.checks.module.inputs import OwnModule, own_module
from spmd_moe.checks.module.run import FAILURES, Outcome, check_module, checks_of
from spmd_moe.cli import check_json
from spmd_moe.cli.check_report import show_crossings
from spmd_moe.cli.check_rows import CROSSINGS_LEGEND
from spmd_moe.cli.degrees import parse_mesh
from spmd_moe.cli.html.page import module_page
from spmd_moe.cli.html.write import write_page
from spmd_moe.cli.tables import say
from spmd_moe.cli.terminal import failure_of, progress

# What it means that a check passed.
PASSED = {
    "types": "every op fits",
    "values": "on simulated ranks they are what the types say",
    "gradients": "the backward is the adjoint of the forward, for every input",
    "reference": "results and gradients are those of one device",
}


def run_module(args: argparse.Namespace, console: Console) -> int:
    """Return 0 if all checks pass, 1 if one fails, 3 if the checker itself does."""
    own = own_module(args.module, None if args.mesh is None else parse_mesh(args.mesh))
    outcome, names = Outcome(), checks_of(own)
    failure, code = None, 0
    try:
        with progress(names, "checking", len(names)) as shown:
            check_module(own, shown, outcome)
    except FAILURES as error:
        if args.debug:
            raise
        failure, code = failure_of(error, AssertionError, RankFailure)
        if isinstance(error, AssertionError):  # of a comparison, which has no line
            line = shown_line(line_of_forward(own.cls))
            failure += f"\n  in {own.cls.__name__}.forward ({line})"
    if args.html is not None:
        write_page(args.html, _page(own, outcome, failure))
    if args.json:
        _print_json(own, outcome, failure)
    else:
        _show(console, own, outcome, failure)
    return code


def _print_json(own: OwnModule, outcome: Outcome, failure: str | None) -> None:
    types = outcome.types
    check_json.print_report(
        "module",
        failure is None,
        failure=failure,
        module=own.name,
        mesh=own.mesh,
        crossings=[check_json.of_crossing(row) for row in types.crossings] if types else [],
        collectives=check_json.of_entries(types.collectives) if types else [],
        checked=outcome.passed,
    )


def _show(console: Console, own: OwnModule, outcome: Outcome, failure: str | None) -> None:
    if outcome.types is not None:
        title = f"{own.name} on {_mesh(own)}, as rank 0 sees it"
        show_crossings(console, title, outcome.types.crossings)
        say(console, f"{CROSSINGS_LEGEND}\n")
    for line in _passed(outcome):
        say(console, line)
    if failure is not None:
        print(failure, file=sys.stderr)
    elif own.reference is None:
        say(console, "reference:  none; a staticmethod `reference` would be compared")


def _page(own: OwnModule, outcome: Outcome, failure: str | None) -> str:
    crossings = outcome.types.crossings if outcome.types else []
    return module_page(own.name, _mesh(own), crossings, _passed(outcome), failure)


def _passed(outcome: Outcome) -> list[str]:
    return [f"{name + ':':<11} {PASSED[name]}" for name in outcome.passed]


def _mesh(own: OwnModule) -> str:
    return ",".join(f"{axis}={size}" for axis, size in own.mesh.items())
