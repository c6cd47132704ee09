"""The comments at the moves of `MoE.forward` say what the table in `layouts.py` implies."""

import ast
import inspect
import re

import pytest
import torch

from placements.inference.transitions import find
from spmd_moe import Parallel, layer
from spmd_moe.checks.trace import Workload, trace
from spmd_moe.layouts import CONFIGURATIONS, layout
from tests.support.moe import CONFIG, PARALLELS

SOURCE = inspect.getsource(layer)

# A move, in words -> by configuration, what runs there.
Moves = dict[str, dict[str, str]]


def moves_of(source: str) -> dict[str, int]:
    """The calls in `MoE.forward` that can communicate, by what they move; and their lines."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    forward = next(n for n in functions if n.name == "forward")
    found: dict[str, int] = {}
    for call in (n for n in ast.walk(forward) if isinstance(n, ast.Call)):
        name = ast.unparse(call.func)
        if name == "_move":
            stages = [ast.unparse(stage).removeprefix("at.") for stage in call.args[1:3]]
            found[" -> ".join(stages)] = call.lineno
        elif name in ("self.dispatcher.dispatch", "self.dispatcher.collect_start"):
            found[name.rpartition(".")[2]] = call.lineno
    return found


def comments(source: str) -> Moves:
    """What the line above each move says: `all-gather in C3, C5; convert in C4`."""
    lines, found = source.splitlines(), Moves()
    for move, number in moves_of(source).items():
        comment = re.fullmatch(r"\s*# (.*)", lines[number - 2])
        assert comment is not None, f"nothing is said of {move}"
        found[move] = {}
        for part in comment[1].split("; "):
            what, _, names = part.partition(" in ")
            found[move] |= dict.fromkeys(names.split(", "), what)
    return found


def by_table(move: str) -> dict[str, str]:
    """What runs at a move in each configuration, by the table and the transitions."""
    found: dict[str, str] = {}
    for name in CONFIGURATIONS:
        at = layout(name)
        if move in ("dispatch", "collect_start"):
            if "ep" in at.rows:
                found[name] = "all-to-all over ep"
            continue
        src, dst = (getattr(at, stage)["tp"] for stage in move.split(" -> "))
        if src.letter != dst.letter:
            row = find("redistribute", src, dst)
            assert row is not None, (name, move)
            found[name] = row.communicates or row.call
    return found


def test_every_move_says_what_runs_in_which_configuration() -> None:
    said = comments(SOURCE)
    assert len(said) == 8
    assert said == {move: by_table(move) for move in said}


@pytest.mark.parametrize(("right", "wrong"), [
    ("all-gather in C3, C5;", "all-gather in C3;"),
    ("# convert in C2\n", "# convert in C1\n"),
    ("reduce-scatter in C1", "all-reduce in C1"),
    ("all-to-all over ep in C1,", "all-to-all over ep in C3,"),
])  # fmt: skip
def test_a_wrong_comment_is_caught(right: str, wrong: str) -> None:
    said = comments(SOURCE.replace(right, wrong, 1))
    assert said != {move: by_table(move) for move in said}


def test_a_missing_comment_is_caught() -> None:
    with pytest.raises(AssertionError, match="nothing is said of added -> output"):
        comments(
            SOURCE.replace("# all-reduce in C2, C4, C5 no SP; reduce-scatter in C3, C5", "")
        )


@pytest.mark.parametrize("parallel", PARALLELS, ids=str)
def test_a_checked_forward_sends_what_the_comments_say(parallel: Parallel) -> None:
    """Where every degree of the configuration is split; else it sends less."""
    found = trace(CONFIG, parallel, Workload(2, 4, torch.float32))
    sent = {(e.axis, e.kind) for e in found.collectives if not e.backward}
    said = {
        ("ep", "all-to-all") if what.endswith(" over ep") else ("tp", what)
        for by_name in comments(SOURCE).values()
        for name, what in by_name.items()
        if name == found.configuration and what != "convert"
    }
    sizes = {**parallel.dense_mesh(), **parallel.sparse_mesh()}
    assert sent == {(axis, kind) for axis, kind in said if sizes[axis] > 1}
