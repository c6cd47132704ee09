"""`spmd-moe lint PATH...`: the patterns of the migration guide, found in source."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from spmd_moe.checks.errors import BadInput
from spmd_moe.cli.check_json import print_report
from spmd_moe.cli.terminal import progress
from spmd_moe.lint.files import python_files
from spmd_moe.lint.look import look_at_file
from spmd_moe.lint.record import CERTAIN, LIKELY, LOOK, SURENESS, Finding, Unread
from spmd_moe.lint.rule import Rule
from spmd_moe.lint.rules import BY_NAME, RULES

EXAMPLES = """examples:
  spmd-moe lint src                         what is found, why, and what to write
  spmd-moe lint --at-least likely src       without what needs a look
  spmd-moe lint --rule to-local,clip src    these rules alone
  spmd-moe lint --format github src         as annotations of a pull request
  spmd-moe lint --json src                  for a machine

A comment `# placements: ok (reason)` on the line, or on the first line of the statement,
silences. Without a reason it does not.

exit codes: 0 nothing found, 1 findings or files that could not be judged,
2 the input cannot be used
"""
# How GitHub shows a finding.
_LEVELS = {CERTAIN: "error", LIKELY: "warning", LOOK: "notice"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument(
        "--rule", action="append", metavar="NAME", help="only these rules, by commas"
    )
    parser.add_argument(
        "--at-least", choices=list(SURENESS), default=LOOK, help="how sure (default: look)"
    )
    parser.add_argument(
        "--tests", action="store_true", help="look at files of tests below folders too"
    )
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument("--json", action="store_true", help="findings as JSON")
    shapes.add_argument("--format", choices=("text", "github"), default="text")


def run(args: argparse.Namespace, console: Console) -> int:
    rules = _rules(args.rule)
    for path in args.paths:
        if not (path.is_file() or path.is_dir()):
            raise BadInput(f"{path}: {_what_is(path)}; give Python files or folders")
    sure = list(SURENESS)[: list(SURENESS).index(args.at_least) + 1]
    files, tests = python_files(args.paths, tests=args.tests)
    found: list[Finding] = []
    unread: list[Unread] = []
    with progress(files, "looking at files", len(files)) as shown:
        for file in shown:
            said = look_at_file(file, rules)
            if isinstance(said, Unread):
                unread.append(said)
            else:
                found += [finding for finding in said if finding.sure in sure]
    if args.json:
        print_report(
            "lint",
            not found and not unread,
            files=len(files),
            tests_left_out=tests,
            findings=[asdict(finding) for finding in found],
            unread=[asdict(one) for one in unread],
        )
    elif args.format == "github":
        _print_for_github(found, unread)
    else:
        _print(found, unread, console)
        _print_sum(found, unread, len(files), tests, console)
    return 1 if found or unread else 0


def _what_is(path: Path) -> str:
    return "is neither a file nor a folder" if path.exists() else "there is no such file"


def _rules(given: list[str] | None) -> Sequence[Rule]:
    if given is None:
        return RULES
    names = [name.strip() for text in given for name in text.split(",")]
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise BadInput(
            f"--rule {unknown[0]}: no such rule; give one of {', '.join(BY_NAME)}"
        )
    return [rule for rule in RULES if rule.name in names]


def _print(found: list[Finding], unread: list[Unread], console: Console) -> None:
    for one in found:
        place = f"{one.path}:{one.line}:{one.column}"
        console.print(f"[bold]{place}[/]: {one.rule} ({one.sure})", soft_wrap=True)
        for head, text in (
            ("", one.code),
            ("why", one.why),
            ("placements", one.placements),
            ("spmd_types", one.spmd_types),
            ("page", one.page),
        ):
            line = f"  {head:12}{text}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for one in unread:
        print(f"{one.path}:{one.line}: {one.why}", file=sys.stderr)


def _print_sum(
    found: list[Finding], unread: list[Unread], files: int, tests: int, console: Console
) -> None:
    by = Counter(one.sure for one in found)
    parts = ", ".join(f"{by[sure]} {sure}" for sure in SURENESS if by[sure])
    lines = [f"{len(found)} findings in {files} files" + (f": {parts}" if parts else "")]
    if unread:
        lines.append(f"{len(unread)} files could not be judged")
    if tests:
        lines.append(f"{tests} files of tests left out (--tests)")
    console.print("; ".join(lines) + ".", markup=False, highlight=False, soft_wrap=True)


def _print_for_github(found: list[Finding], unread: list[Unread]) -> None:
    for one in found:
        here = replace(one, path=_from_here(one.path))
        text = (
            f"{here.why} In placements: {here.placements}. In spmd_types: "
            f"{here.spmd_types}. See {here.page} ({here.sure})."
        )
        where = f"file={_property(here.path)},line={here.line},col={here.column}"
        end = f"endLine={here.end_line},title={_property(here.rule)}"
        print(f"::{_LEVELS[here.sure]} {where},{end}::{_data(text)}")
    for one in unread:
        where = f"file={_property(_from_here(one.path))},line={one.line}"
        print(f"::error {where},title=not judged::{_data(one.why)}")


def _from_here(path: str) -> str:
    """Return a path as GitHub wants it: from the folder in which the command runs."""
    here = os.path.relpath(path)
    return path if here.startswith("..") else here


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
