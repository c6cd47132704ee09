"""Types that ranks sent home as text, read again."""

import ast

from placements.types.axis import AxisType
from placements.types.text import parse_axis_type


def parse_types(text: str) -> dict[str, AxisType]:
    """`{dp:S(0), tp:P}`, as printed, which is the syntax of a Python dict."""
    tree = ast.parse(text.strip(), mode="eval").body
    assert isinstance(tree, ast.Dict), text
    return {
        ast.unparse(axis): parse_axis_type(ast.unparse(t))
        for axis, t in zip(tree.keys, tree.values, strict=True)
        if axis is not None
    }
