"""What is found, and how sure it is."""

import ast
from dataclasses import dataclass
from typing import NamedTuple

# How sure a finding is, the surest first.
CERTAIN, LIKELY, LOOK = "certain", "likely", "look"
SURENESS = {
    CERTAIN: "the source says all that is needed: this is the pattern, and it is wrong or "
    "breaks with the next change",
    LIKELY: "this is the pattern, and what the source shows of the tensors fits",
    LOOK: "this is the pattern, and whether it is right depends on what the source does "
    "not say: have a look, and say so in a comment",
}


class Match(NamedTuple):
    """A place that a rule complains of; `subject` is the tensor that it is about."""

    node: ast.AST
    sure: str
    subject: str = ""


@dataclass(frozen=True, order=True)
class Finding:
    """A complaint at a place in a file; lines and columns count from one."""

    path: str
    line: int
    column: int
    rule: str
    sure: str
    why: str
    placements: str
    spmd_types: str
    page: str
    code: str
    end_line: int


@dataclass(frozen=True, order=True)
class Unread:
    """A file that could not be judged, and why."""

    path: str
    line: int
    why: str
