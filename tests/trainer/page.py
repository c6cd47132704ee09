"""The page docs/trainer_features.md, written and read."""

from tests.trainer.features import COLUMNS
from tests.trainer.judge import Cell

HEAD = """# What a trainer does, on ranks and on one device

Written by `make trainer-page`; `tests/trainer` checks it. Every row is a small language model with MoE layers (`tests/trainer/loop.py`), trained
with one feature more than the plain loop; every column says where. The training is compared with one device, which
is never checked: the losses of all steps, and all parameters, buffers and gradients at the end. "equal" has the largest difference, relative to the
largest value of its tensor. In float64 at most 1e-12 is equal; in bfloat16 at most twice what one device loses by it against
float64. "refused" has the first line of the error. Unless a row says otherwise, types are checked at the first step alone, as
`spmd-moe train` does.

Columns: {columns}.
"""

Cells = dict[str, dict[str, str]]


def page(cells: dict[str, dict[str, Cell]]) -> str:
    said = "; ".join(f"{name}: {setting}" for name, setting in COLUMNS.items())
    lines = [HEAD.format(columns=said)]
    names = list(COLUMNS)
    lines.append(f"| feature | {' | '.join(names)} |")
    lines.append("|---" * (len(names) + 1) + "|")
    for feature, row in cells.items():
        shown = [str(row[name]).replace("|", "\\|") for name in names]
        lines.append(f"| {feature} | {' | '.join(shown)} |")
    return "\n".join(lines)


def read(text: str) -> Cells:
    """The cells of a page, by feature and column."""
    rows = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    _, *names = rows[0]
    return {name: dict(zip(names, cells, strict=True)) for name, *cells in rows[1:]}


def kind(cell: str) -> str:
    """What must be on every machine: not the digits of a difference."""
    return cell.split(",")[0] if cell.startswith("equal,") else cell
