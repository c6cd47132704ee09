"""The pages of the guide, made from the files of a pattern and from what checkers say."""

from tests.migrate.judge import ADJOINT, FORWARD, WORDS, verdicts
from tests.migrate.patterns import BEFORE, NAMES, OURS, PEER, Pattern, pattern

TITLES = {
    BEFORE: "Before: DTensor or raw calls",
    OURS: "After: `placements`",
    PEER: "After: `spmd_types`",
}
_ASKED = {BEFORE: "DTensor or raw calls", OURS: "`placements`", PEER: "`spmd_types`"}

# Above the table of the first page that is measured.
CHECKERS = (FORWARD, ADJOINT, *WORDS)
HEAD = f"| page | {' | '.join(CHECKERS)} |"
RULE = "|---" * (1 + len(CHECKERS)) + "|"


def page(name: str) -> str:
    """Return the page of a pattern; it runs the wrong programs."""
    one = pattern(name)
    _, _, rest = one.docstring("one_device").partition("\n")
    lines = [f"# {_title(one)}", "", rest.strip(), ""]
    lines += [
        "Written by `python -m tests.migrate` from the files in "
        f"`examples/migrate/{name}/`, which `tests/migrate` runs on the same inputs: "
        "results and gradients equal those of one device exactly.",
        "",
    ]
    lines += ["## On one device", "", *_listing(one, "one_device")]
    for version, title in TITLES.items():
        lines += [f"## {title}", "", one.docstring(version), ""]
        lines += _unchecked(one) if version == PEER else []
        lines += _listing(one, version)
    lines += ["## What goes wrong", "", one.docstring("wrong"), ""]
    lines += _listing(one, "wrong")
    lines += [
        "| checker | asked in the words of | verdict on the wrong program |",
        "|---|---|---|",
    ]
    for by, verdict in verdicts(name).items():
        lines.append(f"| {by} | {_ASKED[WORDS.get(by, BEFORE)]} | {verdict} |")
    return "\n".join(lines) + "\n"


def summary_row(name: str) -> str:
    """Return the row of a pattern in the table of the first page: who finds the bug."""
    said = " | ".join(verdict.in_short for verdict in verdicts(name).values())
    return f"| [{_title(pattern(name))}]({name}.md) | {said} |"


def first_page(text: str) -> str:
    """Return the first page with the table of verdicts as measured now."""
    before, _, rest = text.partition(HEAD)
    _, _, after = rest.partition("\n\n")
    return "\n".join([before + HEAD, RULE, *map(summary_row, NAMES), "", after])


def _title(one: Pattern) -> str:
    return one.docstring("one_device").partition("\n")[0].rstrip(".")


def _unchecked(one: Pattern) -> list[str]:
    return [f"Not checked by {by}: {why}.\n" for by, why in one.unchecked.items()]


def _listing(one: Pattern, file: str) -> list[str]:
    return ["```python", one.code(file), "```", ""]
