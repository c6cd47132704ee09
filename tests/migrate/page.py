"""The pages of the guide, made from the files of a pattern and from what checkers say."""

from tests.migrate.judge import WORDS, verdicts
from tests.migrate.patterns import BEFORE, OURS, PEER, Pattern

TITLES = {
    BEFORE: "Before: DTensor or raw calls",
    OURS: "After: `placements`",
    PEER: "After: `spmd_types`",
}
_ASKED = {BEFORE: "DTensor or raw calls", OURS: "`placements`", PEER: "`spmd_types`"}


def page(pattern: Pattern) -> str:
    """Return the page of a pattern; it runs the wrong programs."""
    first, _, rest = pattern.docstring("one_device").partition("\n")
    lines = [f"# {first.rstrip('.')}", "", rest.strip(), ""]
    lines += [
        "Written by `python -m tests.migrate` from the files in "
        f"`examples/migrate/{pattern.name}/`, which `tests/migrate` runs on the same inputs: "
        "results and gradients equal those of one device exactly.",
        "",
    ]
    lines += ["## On one device", "", *_listing(pattern, "one_device")]
    for version, title in TITLES.items():
        lines += [f"## {title}", "", pattern.docstring(version), ""]
        lines += _listing(pattern, version)
    lines += ["## What goes wrong", "", pattern.docstring("wrong"), ""]
    lines += _listing(pattern, "wrong")
    lines += [
        "| checker | asked in the words of | verdict on the wrong program |",
        "|---|---|---|",
    ]
    for by, verdict in verdicts(pattern).items():
        lines.append(f"| {by} | {_ASKED[WORDS.get(by, BEFORE)]} | {verdict} |")
    return "\n".join(lines) + "\n"


def _listing(pattern: Pattern, file: str) -> list[str]:
    return ["```python", pattern.code(file), "```", ""]
