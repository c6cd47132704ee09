"""`spmd-moe bugs`: published bugs, what refuses them here, and what the peers say."""

import argparse
import inspect
import json
import textwrap
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import track
from rich.syntax import Syntax
from rich.table import Table

from spmd_moe.bugs.catalogue import BUGS
from spmd_moe.bugs.findings import Finding, find_all, markdown, summary
from spmd_moe.bugs.measure import CRASHED as CRASHED_BY
from spmd_moe.bugs.measure import measure
from spmd_moe.bugs.peers.opinions import (
    ACCEPTED,
    BOTH,
    CRASHES,
    HARMLESS,
    NOT_WRITTEN,
    REFUSED,
    opinion_of,
    peers,
)
from spmd_moe.bugs.record import KINDS, Bug
from spmd_moe.checks.errors import BadInput
from spmd_moe.cli.terminal import CRASHED

EXAMPLES = """examples:
  spmd-moe bugs                 the table, measured now: every program is run
  spmd-moe bugs --show B35      both programs and the whole error
  spmd-moe bugs --json          the same findings for a machine
  spmd-moe bugs --markdown      the text of docs/bugs.md
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--show", metavar="ID", help="both programs of a bug, and the error"
    )
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument("--json", action="store_true", help="findings as JSON")
    shapes.add_argument("--markdown", action="store_true", help="the text of docs/bugs.md")


def run(args: argparse.Namespace, console: Console) -> int:
    if args.show is not None:
        return _show(args.show, console)
    shown = track(
        BUGS,
        "running the programs",
        console=Console(stderr=True),
        transient=True,
        disable=not console.is_terminal,
    )
    findings = find_all(shown)
    if args.json:
        print(json.dumps([finding.as_json() for finding in findings], indent=1))
    elif args.markdown:
        print(markdown(findings), end="")
    else:
        console.print(_table(findings))
        for line in summary(findings):
            console.print(line, highlight=False)
    if any(finding.crash is not None for finding in findings):
        return CRASHED
    return 0 if all(finding.as_expected for finding in findings) else 1


# A peer's verdict in one sign.
_MARKS = {REFUSED: "x", ACCEPTED: "o", BOTH: "xx", HARMLESS: "=", NOT_WRITTEN: "-",
          CRASHES: "!"}  # fmt: skip


def _table(findings: list[Finding]) -> Table:
    names = list(findings[0].opinions) if findings else []
    table = Table(
        title="Published bugs, and what refuses them",
        caption=f"The last columns are {', '.join(names)}: x refuses, o accepts, - cannot "
        "be written there, ! crashes. docs/bugs.md says what the kinds are.",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("bug", no_wrap=True)
    table.add_column("project", max_width=24)
    table.add_column("kind")
    table.add_column("refused by")
    table.add_column("the error", ratio=1, overflow="fold")
    for name in names:
        table.add_column("".join(word[0] for word in name.split()), no_wrap=True)
    for finding in findings:
        bug = finding.bug
        said = [_MARKS[finding.opinions[name].verdict] for name in names]
        by = "accepted" if finding.must_accept else finding.by
        table.add_row(bug.id, bug.project, bug.kind, by, finding.headline, *said)
    return table


def _show(wanted: str, console: Console) -> int:
    bug = next((one for one in BUGS if one.id == wanted.upper()), None)
    if bug is None:
        known = ", ".join(one.id for one in BUGS)
        raise BadInput(f"--show {wanted}: no such bug; choose one of {known}")
    verdict = measure(bug)
    opinions = {name: opinion_of(engine, bug) for name, engine in peers().items()}
    console.print(f"[bold]{bug.id}[/] {bug.project}: {bug.title}", highlight=False)
    console.print(f"{bug.kind}, {KINDS[bug.kind]}; on {_mesh(bug)}\n", highlight=False)
    for name in ("wrong", "kit", "right"):
        if bug.program(name) is not None:
            _print_program(bug, name, console)
    if verdict.error is not None:
        how = "not judged" if verdict.by == CRASHED_BY else f"refused by {verdict.by}"
        console.print(f"[bold]{how}[/]", highlight=False)
        console.print(str(verdict.error), markup=False, highlight=False)
    for name, opinion in opinions.items():
        text = f"{name}: {opinion.verdict} ({opinion.why})"
        console.print(text, markup=False, highlight=False)
    if verdict.right_failed is not None:
        console.print("the right program FAILED:", highlight=False)
        console.print(str(verdict.right_failed), markup=False, highlight=False)
    else:
        console.print("the right program passes, and equals one device", highlight=False)
    if verdict.crash is not None:
        return CRASHED
    return 0 if verdict.is_as(bug) else 1


def _print_program(bug: Bug, name: str, console: Console) -> None:
    program: Any = bug.program(name)
    source = textwrap.dedent(inspect.getsource(program)).replace("@staticmethod\n", "", 1)
    console.print(Syntax(source, "python", background_color="default"))


def _mesh(bug: Bug) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in bug.mesh.items())
