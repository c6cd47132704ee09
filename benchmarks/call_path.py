"""How far one call travels through the package: `python -m benchmarks.call_path`.

It counts what a reader has to follow: the Python calls into files of `placements`, the
files that they are in, and how often the next call is in another file than the last one.
The last column counts the way back too: every change of file by a call or by a return.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import linear

import placements
from placements import (
    P,
    PlacementError,
    R,
    S,
    all_reduce,
    assert_type,
    set_current_mesh,
    typecheck,
)
from placements._torch import unseen

PACKAGE = f"{Path(placements.__file__).parent}{os.sep}"


class CallPath(NamedTuple):
    """The way of one call through the package."""

    calls: list[str]  # the file of each
    with_returns: int

    @property
    def files(self) -> int:
        return len(set(self.calls))

    @property
    def switches(self) -> int:
        before = ["", *self.calls[:-1]]
        return sum(a != b for a, b in zip(before, self.calls, strict=True))


def _is_aside(frame: FrameType) -> bool:
    """Return whether torch itself calls `max` or `min`, which a block replaces."""
    return (
        frame.f_code.co_name == "of_all_axes"
        and frame.f_back is not None
        and (not frame.f_back.f_code.co_filename.startswith(PACKAGE))
    )


def followed(function: Callable[[], object]) -> CallPath:
    """Run the function, and record which files of the package it goes through."""
    calls: list[str] = []
    changes: list[str] = []

    def enter(file: str) -> None:
        if changes[-1:] != [file]:
            changes.append(file)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE) or _is_aside(frame):
            return
        if event == "call":
            calls.append(file)
            enter(file)
        elif event == "return":
            outer = frame.f_back
            while outer is not None and not outer.f_code.co_filename.startswith(PACKAGE):
                outer = outer.f_back
            if outer is not None:
                enter(outer.f_code.co_filename)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return CallPath(calls, len(changes))


def measure() -> dict[str, CallPath]:
    """The paths of an op, of a refused op, and of a collective."""
    with set_current_mesh({"dp": 2, "tp": 2}), typecheck():
        x = assert_type(torch.randn(4, 6), {"dp": S(0), "tp": R})
        w = assert_type(torch.randn(6, 6), {"dp": R, "tp": S(0)})
        p, q = (assert_type(torch.randn(4, 6), {"dp": S(0), "tp": P}) for _ in range(2))

        # So that the refusal is measured, and not how the op is first found, nor what torch
        # imports for its first tensor without memory: fixes are tried on such tensors.
        x + x
        with unseen():
            torch.empty(2, device="meta") + torch.empty(2, device="meta")

        def refused() -> None:
            try:
                p + x
            except PlacementError:
                return
            raise AssertionError("p + r was accepted")

        return {
            "F.linear, the first time": followed(lambda: linear(x, w)),
            "F.linear, the same again": followed(lambda: linear(x, w)),
            "p + r, refused": followed(refused),
            "all_reduce": followed(lambda: all_reduce(q, "tp", src=P, dst=R)),
        }


def main() -> None:
    table = Table("call, checked", "calls", "files", "switches", "with returns")
    for what, path in measure().items():
        row = len(path.calls), path.files, path.switches, path.with_returns
        table.add_row(what, *map(str, row))
    (Console() if sys.stdout.isatty() else Console(width=100)).print(table)


if __name__ == "__main__":
    main()
