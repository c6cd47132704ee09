"""Types as text: print them, and parse what was printed."""

import ast
from typing import Any

from placements.types.axis import BY_LETTER, WORDS, AxisType, Shard
from placements.types.errors import ArgumentError
from placements.types.extents import Even, Extent, Folded, Padded, Ragged, ZigZag

_CLASSES: dict[type, AxisType] = {type(t): t for t in BY_LETTER.values()}


def as_axis_type(like: object) -> AxisType:
    """Return an AxisType from one, from its class, or from its text."""
    if isinstance(like, AxisType):
        return like
    if isinstance(like, type) and like in _CLASSES:
        return _CLASSES[like]
    if isinstance(like, str):
        return parse_axis_type(like)
    raise ArgumentError(
        f"a placement is R, I, V, P or S(dim) "
        f"(Replicate(), Invariant(), Varying(), Partial(), Shard(dim)), got {like!r}"
    )


_EXTENTS = {kind.__name__: kind for kind in (Even, Padded, Ragged, ZigZag, Folded)}


_WORD_OR_LETTER: dict[str, AxisType] = {
    **BY_LETTER,
    **{WORDS[letter]: t for letter, t in BY_LETTER.items()},
}


def parse_axis_type(text: str) -> AxisType:
    """`R`, `I`, `V`, `P`, `S(1)` or `S(1, Padded(5))`, as printed."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return _axis_type_of(tree)
    except (SyntaxError, ValueError, TypeError, KeyError) as error:
        raise ArgumentError(
            f"{text!r} is not a placement; write R, I, V, P, S(dim) or "
            f"S(dim, extent) such as S(1, Padded(5))"
        ) from error


def _axis_type_of(node: ast.expr) -> AxisType:
    if isinstance(node, ast.Name):
        return _WORD_OR_LETTER[node.id]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if not node.args and not node.keywords:
            return _WORD_OR_LETTER[node.func.id]
        if node.func.id in ("S", "Shard") and not node.keywords:
            dim = ast.literal_eval(node.args[0])
            extent = _extent_of(node.args[1]) if len(node.args) == 2 else None
            return Shard(dim, extent)
    raise ValueError(ast.dump(node))


def _extent_of(node: ast.expr) -> Extent:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise ValueError(ast.dump(node))
    parts: list[Any] = [
        _extent_of(arg) if isinstance(arg, ast.Call) else ast.literal_eval(arg)
        for arg in node.args
    ]
    return _EXTENTS[node.func.id](*parts)


def print_word(t: AxisType) -> str:
    """`Replicate`, or `S(0)`: a type in a sentence."""
    return repr(t) if isinstance(t, Shard) else WORDS[t.letter]
