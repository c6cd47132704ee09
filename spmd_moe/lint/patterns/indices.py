"""Arithmetic with ranks and sizes in the place of types."""

import ast
from collections.abc import Iterator
from typing import cast

from spmd_moe.lint.place import Place
from spmd_moe.lint.record import LIKELY, LOOK, Match
from spmd_moe.lint.trees import inside, last, words_in, written
from spmd_moe.lint.values import Fact
from spmd_moe.lint.words import ROWS

_CHUNKS = ("chunk", "tensor_split", "split")
_MAKES = (
    "zeros", "empty", "ones", "full", "new_zeros", "new_empty", "new_ones", "new_full"
)  # fmt: skip


def by_rank(node: ast.AST, at: Place) -> Iterator[Match]:
    """`ids + rank * n`, `x[rank * n : ...]`, `x.chunk(n)[rank]`."""
    if not at.file.has_ranks or at.function is None or at.is_declared:
        return
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        for rows, offset in ((node.left, node.right), (node.right, node.left)):
            if _is_offset(offset, at) and _are_rows(rows, at):
                yield Match(node, LIKELY, written(rows))
                return
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
        if _is_offset(node.value, at) and _are_rows(node.target, at):
            yield Match(node, LIKELY, written(node.target))
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        yield from _cut(node, at)


def _is_offset(node: ast.expr, at: Place) -> bool:
    """`rank * n`, or a name for it."""
    return bool(at.of(node) & Fact.OFFSET) and not _are_rows(node, at)


def _are_rows(node: ast.AST, at: Place) -> bool:
    """Whether the name says that a tensor numbers rows; a counter or a rank does not."""
    if not isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
        return False
    if at.of(node) & (Fact.RANK | Fact.RANKS | Fact.SIZE):
        return False
    if isinstance(node, ast.Call):
        return last(at.name_of(node.func)) == "arange"
    word = last(ast.unparse(node.value if isinstance(node, ast.Subscript) else node))
    return ROWS.search(word) is not None and word.endswith(
        ("ids", "indices", "tokens", "positions", "slots", "idxs", "inds")
    )


def _cut(node: ast.Subscript, at: Place) -> Iterator[Match]:
    """A piece of a tensor, chosen by the rank."""
    value, index = node.value, node.slice
    if isinstance(value, ast.Call) and at.of(index) & Fact.RANK:
        name = at.name_of(value.func) or ast.unparse(value.func)
        is_tensor = isinstance(value.func, ast.Attribute) and len(value.args) > 0
        if last(name) in _CHUNKS and is_tensor and not _is_text(value):
            whole = cast(ast.Attribute, value.func).value
            if not (isinstance(whole, ast.Subscript) and any(_cut(whole, at))):
                yield Match(node, LOOK, written(whole))
    first = index.elts[0] if isinstance(index, ast.Tuple) and index.elts else index
    parts = index.elts if isinstance(index, ast.Tuple) else [first]
    for part in parts:
        if (
            isinstance(part, ast.Slice)
            and part.lower is not None
            and part.upper is not None
        ):
            if _is_offset(part.lower, at) and at.gradient(value) is not None:
                yield Match(node, LIKELY, written(value))


def _is_text(call: ast.Call) -> bool:
    return (
        bool(call.args)
        and isinstance(call.args[0], ast.Constant | ast.JoinedStr)
        and (
            not isinstance(call.args[0], ast.Constant)
            or isinstance(call.args[0].value, str)
        )
    )


def even(node: ast.AST, at: Place) -> Iterator[Match]:
    """A buffer of `ranks * x.shape[0]` rows, or an offset of `rank * x.shape[0]`."""
    if at.no_grad or not at.file.has_ranks or at.is_declared:
        return
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        sides = (at.of(node.left), at.of(node.right))
        if any(a & Fact.RANK and b & Fact.SIZE for a, b in (sides, sides[::-1])):
            yield Match(node, LOOK, written(node))
    if not isinstance(node, ast.Call):
        return
    if last(ast.unparse(node.func)) not in _MAKES:
        return
    for one in (*node.args, *(k.value for k in node.keywords if k.arg == "size")):
        for part in inside(one):
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult):
                sides = (at.of(part.left), at.of(part.right))
                if any(
                    a & Fact.RANKS and b & Fact.SIZE and not b & Fact.RANKS
                    for a, b in (sides, sides[::-1])
                ):
                    yield Match(node, LOOK, written(part))
                    return


def masked_vocabulary(node: ast.AST, at: Place) -> Iterator[Match]:
    """`(ids < vocab_start) | (ids >= vocab_end)`."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.BitOr | ast.BitAnd):
        return
    if at.is_declared:
        return
    if isinstance(node.left, ast.Compare) and isinstance(node.right, ast.Compare):
        words = words_in(node)
        is_named = any("vocab" in w and ("start" in w or "min" in w) for w in words)
        bounds = (*node.left.comparators, *node.right.comparators)
        if is_named or all(at.of(bound) & Fact.OFFSET for bound in bounds):
            yield Match(node, LIKELY, written(node.left.left))
