"""Looks for what the rules complain of, in a text or a file."""

import ast
import re
import tokenize
import warnings
from collections.abc import Sequence
from pathlib import Path

from spmd_moe.lint.place import File
from spmd_moe.lint.record import Finding, Match, Unread
from spmd_moe.lint.rule import Rule
from spmd_moe.lint.rules import RULES
from spmd_moe.lint.silence import silences
from spmd_moe.lint.walk import Walk
from spmd_moe.lint.words import EXPERTS_IN_USE, RANKS_IN_USE

_UNEXPLAINED = (
    " (`# placements: ok` here gives no reason in parentheses, so it does not silence.)"
)
_FILTERS = {rule.name: re.compile(rule.words) for rule in RULES}


def look_at_file(path: Path, rules: Sequence[Rule] = RULES) -> list[Finding] | Unread:
    """Return what the rules find in a file, or why it could not be judged."""
    name = str(path)
    try:
        with tokenize.open(path) as file:
            text = file.read()
    except OSError as error:
        return Unread(name, 1, f"cannot be read: {error.strerror or error}")
    except (SyntaxError, UnicodeDecodeError) as error:
        return Unread(name, 1, f"is no text in its encoding: {error}")
    return look_at_text(text, name, rules)


def look_at_text(
    text: str, path: str, rules: Sequence[Rule] = RULES
) -> list[Finding] | Unread:
    """Return what the rules find in a text; nothing of it is imported or run."""
    if not (RANKS_IN_USE.search(text) or EXPERTS_IN_USE.search(text)):
        return []
    fitting = [rule for rule in rules if _FILTERS[rule.name].search(text)]
    if not fitting:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(text)
        found = Walk(File(text, tree, Path(path).stem), fitting).run()
    except SyntaxError as error:
        return Unread(path, error.lineno or 1, f"does not parse: {error.msg}")
    except ValueError as error:  # a null byte
        return Unread(path, 1, f"does not parse: {error}")
    except (RecursionError, MemoryError):
        return Unread(path, 1, "does not parse: nested too deeply")
    lines, silenced = text.splitlines(), silences(text)
    findings: list[Finding] = []
    for rule, match, statement in found:
        on = {_line(match.node), statement.lineno}
        reasons = [silenced[line] for line in on if line in silenced]
        if not any(reasons):
            findings.append(_finding(rule, match, path, lines, unexplained=bool(reasons)))
    return sorted(set(findings))


def _line(node: ast.AST) -> int:
    assert isinstance(node, ast.expr | ast.stmt)
    return node.lineno


def _finding(
    rule: Rule, match: Match, path: str, lines: list[str], *, unexplained: bool
) -> Finding:
    node = match.node
    assert isinstance(node, ast.expr | ast.stmt)
    line = lines[node.lineno - 1]
    column = len(line.encode()[: node.col_offset].decode()) + 1
    subject = match.subject or "x"
    return Finding(
        path=path,
        line=node.lineno,
        column=column,
        rule=rule.name,
        sure=match.sure,
        why=rule.why + (_UNEXPLAINED if unexplained else ""),
        placements=rule.placements.replace("<x>", subject),
        spmd_types=rule.spmd_types.replace("<x>", subject),
        page=f"docs/migrate/{rule.page}.md",
        code=line.strip(),
        end_line=node.end_lineno or node.lineno,
    )
