"""`spmd-moe check --module`: what was checked of a module of one's own, told."""

import json
import sys
from typing import Any

from rich.console import Console

from spmd_moe.cli import check_json
from spmd_moe.cli.own_module import OwnModule, own_module
from spmd_moe.cli.run_own_module import (
    check_gradients,
    check_reference,
    check_types,
    check_values,
)
from spmd_moe.cli.tables import LEGEND, crossing_table, titled
from spmd_moe.cli.terminal import BadInput


def run_module(name: str, mesh: str | None, console: Console, *, as_json: bool) -> int:
    """0 if all checks pass, 1 if one fails; PlacementError if it does not type-check."""
    own = own_module(name, None if mesh is None else parse_mesh(mesh))
    found = check_types(own)
    done = ["types"]
    failure = ""
    try:
        check_values(own)
        done.append("values")
        check_gradients(own, found.outs)
        done.append("gradients")
        if own.reference is not None:
            check_reference(own)
            done.append("reference")
    except AssertionError as error:
        failure = str(error)
    if as_json:
        content: dict[str, Any] = {
            "module": name,
            "mesh": own.mesh,
            "crossings": [check_json.of_crossing(row) for row in found.crossings],
            "collectives": check_json.of_entries(found.collectives),
            "checked": done,
            "failure": failure or None,
        }
        print(json.dumps(check_json.report("module", not failure, **content), indent=2))
        return 1 if failure else 0
    titled(console, _title(own), crossing_table(found.crossings))
    console.print(LEGEND, highlight=False)
    console.print()
    for check in done:
        console.print(f"{check + ':':<11} {SAID[check]}", highlight=False)
    if own.reference is None:
        console.print("reference:  none; a staticmethod `reference` would be compared")
    if failure:
        print(failure, file=sys.stderr)
    return 1 if failure else 0


SAID = {
    "types": "every op fits",
    "values": "on simulated ranks they are what the types say",
    "gradients": "the backward is the adjoint of the forward, for every input",
    "reference": "results and gradients are those of one device",
}


def parse_mesh(text: str) -> dict[str, int]:
    """`dp=2,tp=4`, with any names."""
    sizes: dict[str, int] = {}
    for item in filter(None, text.replace(" ", "").split(",")):
        axis, _, count = item.partition("=")
        if not (axis.isidentifier() and count.isdigit() and int(count) >= 1):
            raise BadInput(f"--mesh {text}: {item!r} is no axis; write it as dp=2,tp=4")
        sizes[axis] = int(count)
    if not sizes:
        raise BadInput("--mesh: names no axis; write it as dp=2,tp=4")
    return sizes


def _title(own: OwnModule) -> str:
    sizes = ",".join(f"{axis}={size}" for axis, size in own.mesh.items())
    return f"{own.name} on {sizes}, as rank 0 sees it"
