"""`python -m spmd_moe.cli.layouts_page` prints docs/layouts.md, the table of the layer."""

from typing import Any

from placements import dual
from spmd_moe.layouts import CONFIGURATIONS, TABLE, Types, layout


def markdown() -> str:
    """Return the table as a Markdown page: each type, then the type of the gradient."""
    data = ("dp", "cp", "edp")
    heads = [f"{name} ({what})" for name, what in CONFIGURATIONS.items()]
    lines = [
        "# Placements of the layer",
        "",
        "Generated from `spmd_moe/layouts.py` by `make docs`; do not edit by hand.",
        "A cell is the type of a tensor on an axis, then the type of its gradient.",
        "",
        "| tensor | meaning | dp, cp, edp | " + " | ".join(heads) + " |",
        "|" + "---|" * (3 + len(heads)),
    ]
    for row in TABLE:
        common = {axis: getattr(row, axis) for axis in data if getattr(row, axis)}
        if common.get("cp") is None and "dp" in common:
            common = {"dp, cp": common.pop("dp"), **common}
        said = ", ".join(f"{axes}: {t}" for axes, t in common.items())
        cells: list[str] = [f"`{row.tensor}`", row.meaning, said]
        for name in CONFIGURATIONS:
            types: Any = getattr(layout(name), row.tensor)
            cells.append(_text(types, row.has_gradient))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _text(types: Types, has_gradient: bool) -> str:
    return ", ".join(
        f"{axis}: {t!r}" + (f" \\| {dual(t)!r}" if has_gradient else "")
        for axis, t in types.items()
        if axis not in ("dp", "cp", "edp")
    )


if __name__ == "__main__":
    print(markdown(), end="")
