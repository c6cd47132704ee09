"""The expression of the user's code that a frame is at, and its parts as code.

Only errors and reports read it. Python keeps for every instruction the columns of the
expression that the instruction belongs to, so a call can be shown as it is written, and
what it was given by the expressions that stand in it.
"""

import ast
import linecache
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import CodeType, FrameType
from typing import Any, cast

from torch import Tensor, nn

from placements._torch import registered_in

_LONGEST = 60  # a longer expression says less than the name of its slot


def expression_at(code: CodeType, instruction: int) -> ast.AST | None:
    """Return the expression, or augmented assignment, that an instruction belongs to."""
    span = next(islice(code.co_positions(), instruction // 2, None), None)
    if span is None or None in span:
        return None
    first, last, begin, end = cast(tuple[int, int, int, int], span)
    lines = [
        line.encode() for line in linecache.getlines(code.co_filename)[first - 1 : last]
    ]
    if not lines:
        return None
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    text = b"".join(lines).decode(errors="replace")
    for source in (f"({text}\n)", text):
        try:
            statement = ast.parse(source).body[0]
        except (SyntaxError, IndexError, ValueError):
            continue
        return statement.value if isinstance(statement, ast.Expr) else statement
    return None


def code_of(node: ast.AST) -> str | None:
    """Return the expression as code, if it is short."""
    text = ast.unparse(node)
    return text if len(text) <= _LONGEST and "\n" not in text else None


def name_in_code(frame: FrameType, wanted: object) -> str | None:
    """Return what the expression at the frame calls a value: `self.w1`, `blocks[0].w`.

    Nothing of the program is run for it: only names, attributes that are kept as such,
    and items of lists, tuples and dicts are looked up.
    """
    node = expression_at(frame.f_code, frame.f_lasti)
    for part in () if node is None else ast.walk(node):
        if not isinstance(part, ast.Name | ast.Attribute | ast.Subscript):
            continue
        value = _value(part, frame)
        if value is wanted:
            return code_of(part)
        if isinstance(value, nn.Module):
            for name, held in _state(value):
                if held is wanted:
                    return f"{ast.unparse(part)}.{name}"
    return None


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


_NOTHING = object()


def _value(node: ast.AST, frame: FrameType) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        found = frame.f_locals.get(node.id, _NOTHING)
        return frame.f_globals.get(node.id, _NOTHING) if found is _NOTHING else found
    if isinstance(node, ast.Attribute):
        return _attribute(_value(node.value, frame), node.attr)
    if isinstance(node, ast.Subscript):
        owner, key = _value(node.value, frame), _value(node.slice, frame)
        if isinstance(owner, list | tuple | dict) and isinstance(key, int | str):
            try:
                return cast(Any, owner)[key]
            except (LookupError, TypeError):
                return _NOTHING
        if isinstance(owner, nn.ModuleList | nn.ParameterList) and isinstance(key, int):
            return _attribute(owner, str(key))
    return _NOTHING


def _attribute(owner: object, name: str) -> Any:
    kept: dict[str, Any] = getattr(owner, "__dict__", {})
    if isinstance(owner, nn.Module):
        kept = kept | registered_in(owner)
    if name in kept:
        return kept[name]
    fields: tuple[str, ...] = getattr(owner.__class__, "_fields", ())
    if isinstance(owner, tuple) and name in fields:
        return cast(Any, owner)[fields.index(name)]
    return _NOTHING


_OPERATORS = {
    "Add": "add", "Sub": "sub", "Mult": "mul", "Div": "div", "MatMult": "matmul",
    "Pow": "pow", "Mod": "remainder", "FloorDiv": "floor_divide", "BitAnd": "and",
    "BitOr": "or", "BitXor": "xor", "LShift": "lshift", "RShift": "rshift",
    "Eq": "eq", "NotEq": "ne", "Lt": "lt", "LtE": "le", "Gt": "gt", "GtE": "ge",
    "USub": "neg", "Invert": "bitwise_not",
}  # fmt: skip
_OTHER_WORDS = {
    "subtract": "sub", "multiply": "mul", "truediv": "div", "true_divide": "div",
    "mod": "remainder", "floordiv": "floor_divide", "invert": "bitwise_not",
}  # fmt: skip


def _word(name: str) -> str:
    bare = name.strip("_").removesuffix("_")
    return _OTHER_WORDS.get(bare, bare)


def arguments_in_code(
    frame: FrameType, call: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, str]]:
    """Yield each argument of a call, and each item of a list among them, with its code.

    Nothing, if the frame is at another call than this one: a module of torch may make it.
    """
    node = expression_at(frame.f_code, frame.f_lasti)
    given, by_name = _written(node, _word(call), len(args))
    for value, part in zip(args, given, strict=False):
        yield from _with_code(value, part)
    for name, value in kwargs.items():
        if name in by_name:
            yield from _with_code(value, by_name[name])


def first_argument_in_code(frame: FrameType, call: str) -> str | None:
    """Return the first argument of a call, or what its method is called on, as code."""
    node = expression_at(frame.f_code, frame.f_lasti)
    if isinstance(node, ast.Call) and node.args:
        given, _ = _written(node, _word(call), len(node.args))
    else:
        given, _ = _written(node, _word(call), 1)
    return code_of(given[0]) if given else None


def _written(
    node: ast.AST | None, call: str, count: int
) -> tuple[list[ast.expr], dict[str, ast.expr]]:
    """Return the expressions of a call's positional arguments, and of its keywords."""
    if isinstance(node, ast.Call):
        called, first = node.func, list[ast.expr]()
        if isinstance(called, ast.Attribute):
            name, first = called.attr, [called.value]
        else:
            name = called.id if isinstance(called, ast.Name) else ""
        if _word(name) == call and not any(isinstance(a, ast.Starred) for a in node.args):
            is_method = count == len(node.args) + 1
            given = [*first, *node.args] if is_method else list(node.args)
            named = {k.arg: k.value for k in node.keywords if k.arg is not None}
            return (given if count == len(given) else []), named
    elif isinstance(node, ast.BinOp | ast.AugAssign):
        left, right = (
            (node.left, node.right)
            if isinstance(node, ast.BinOp)
            else (node.target, node.value)
        )
        operator = _OPERATORS.get(type(node.op).__name__)
        if call == operator:
            return [left, right], {}
        if call == f"r{operator}":
            return [right, left], {}
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        if call == _OPERATORS.get(type(node.ops[0]).__name__):
            return [node.left, node.comparators[0]], {}
    elif isinstance(node, ast.UnaryOp):
        if call == _OPERATORS.get(type(node.op).__name__):
            return [node.operand], {}
    elif isinstance(node, ast.Subscript) and call in ("getitem", "setitem"):
        return [node.value, node.slice], {}
    elif isinstance(node, ast.Attribute) and call == node.attr:
        return [node.value], {}
    return [], {}


def _with_code(value: Any, node: ast.AST) -> Iterator[tuple[Any, str]]:
    text = code_of(node)
    if text is not None:
        yield value, text
    if isinstance(node, ast.List | ast.Tuple) and isinstance(value, list | tuple):
        items = cast(Sequence[Any], value)
        if len(items) == len(node.elts):
            for item, part in zip(items, node.elts, strict=True):
                yield from _with_code(item, part)
    elif isinstance(node, ast.Slice) and isinstance(value, slice):
        bounds = cast(Any, value)
        for item, part in (
            (bounds.start, node.lower), (bounds.stop, node.upper), (bounds.step, node.step)
        ):  # fmt: skip
            if part is not None:
                yield from _with_code(item, part)
