"""`python -m spmd_moe.lint.page`: writes the rule table of docs/lint.md anew."""

import re
import sys
from pathlib import Path

from spmd_moe.lint.record import SURENESS
from spmd_moe.lint.rules import RULES

START, END = "<!-- rules: make docs -->", "<!-- end of rules -->"


def table() -> str:
    """Return the part of the page that is made from the rules."""
    lines = ["| how sure | what it means |", "|---|---|"]
    lines += [f"| {sure} | {meaning} |" for sure, meaning in SURENESS.items()]
    lines += ["", "| rule | why | in `placements` | in `spmd_types` | page |"]
    lines.append("|---|---|---|---|---|")
    for rule in RULES:
        cells = (rule.why, rule.placements, rule.spmd_types)
        shown = " | ".join(cell.replace("<x>", "x").replace("|", "\\|") for cell in cells)
        lines.append(f"| {rule.name} | {shown} | {rule.page} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """Return the page with the table as it is now."""
    pattern = f"{re.escape(START)}.*?{re.escape(END)}"
    new, found = re.subn(
        pattern, lambda _: f"{START}\n\n{table()}\n\n{END}", page, flags=re.DOTALL
    )
    assert found == 1, f"the page has no {START} ... {END}"
    return new


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_table(file.read_text()))
