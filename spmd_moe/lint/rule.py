"""What a rule is."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from spmd_moe.lint.place import Place
from spmd_moe.lint.record import Match

Matcher = Callable[[ast.AST, Place], Iterator[Match]]


@dataclass(frozen=True)
class Rule:
    """A row of the table. `<x>` in the replacements stands for the subject of a match.

    `words` is a regular expression without which a file cannot break the rule, so files
    without it need not be parsed. `on` are the nodes that `match` is asked about.
    """

    name: str
    why: str
    placements: str
    spmd_types: str
    page: str
    words: str
    on: tuple[type[ast.AST], ...]
    match: Matcher
