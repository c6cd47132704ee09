"""Collectives on tensors that need gradients, and what is sent by them."""

import ast
from collections.abc import Iterator

from spmd_moe.lint.place import Place, is_collective, reduce_op
from spmd_moe.lint.record import LIKELY, LOOK, Match
from spmd_moe.lint.trees import argument, inside, last, words_in, written
from spmd_moe.lint.values import Fact
from spmd_moe.lint.words import (
    COUNTS,
    DIST,
    FUNCTIONAL,
    NN,
    OF_NN,
    RAW,
    RAW_EXCHANGES,
    SUMMING,
)

# What functions of layers are called, by a part of their names.
_OF_LAYERS = (
    "forward", "call", "dispatch", "combine", "expert", "moe", "mlp", "rout", "permute"
)  # fmt: skip
Table = dict[str, tuple[int, tuple[str, ...]]]


def _sent(node: ast.AST, at: Place, table: Table) -> ast.expr | None:
    """Return what a raw collective of a table sends."""
    if not isinstance(node, ast.Call):
        return None
    name = at.name_of(node.func)
    if not name.startswith(DIST) or name.count(".") != 2 or last(name) not in table:
        return None
    position, keywords = table[last(name)]
    return argument(node, position, *keywords)


def _undifferentiated(node: ast.AST, at: Place, table: Table) -> Iterator[Match]:
    sent = _sent(node, at, table)
    if sent is None or reduce_op(node, at.file) not in ("", "SUM"):
        return
    sure = at.gradient(sent)
    if sure is not None:
        yield Match(node, sure, written(sent))


def raw(node: ast.AST, at: Place) -> Iterator[Match]:
    """A collective that autograd does not see, on a tensor that needs a gradient."""
    yield from _undifferentiated(node, at, RAW)


def raw_exchange(node: ast.AST, at: Place) -> Iterator[Match]:
    """The same of all-to-alls."""
    yield from _undifferentiated(node, at, RAW_EXCHANGES)


def fixed_backward(node: ast.AST, at: Place) -> Iterator[Match]:
    """A collective whose backward takes the result for one that ranks use differently."""
    if not isinstance(node, ast.Call):
        return
    name = at.name_of(node.func)
    is_ours = (name.startswith(NN) and last(name) in OF_NN) or (
        name.startswith("funcol.") and last(name) in FUNCTIONAL
    )
    if not is_ours or at.no_grad or reduce_op(node, at.file) in ("MAX", "MIN", "PRODUCT"):
        return
    sent = argument(node, 0, "tensor", "self", "input")
    if sent is None or at.of(sent) & Fact.PLAIN:
        return
    if name.startswith("funcol.") and at.gradient(sent) is None:
        return  # used for numbers as well; the others are there for their backward
    yield Match(node, LOOK, written(sent))


def added_first(node: ast.AST, at: Place) -> Iterator[Match]:
    """A sum over ranks of something to which a bias or the like was already added."""
    if not isinstance(node, ast.Call) or not is_collective(at.name_of(node.func)):
        return
    if last(at.name_of(node.func)).lstrip("_") not in SUMMING:
        return
    summed = argument(node, 0, "tensor", "input")
    if at.of(summed) & Fact.EXTRA and not at.of(summed) & Fact.REDUCED:
        yield Match(node, LIKELY, written(summed))


def counts(node: ast.AST, at: Place) -> Iterator[Match]:
    """Tokens for each expert, summed over an axis that is chosen by hand."""
    sent = _sent(node, at, {name: RAW[name] for name in SUMMING})
    if sent is not None and any(COUNTS.search(word) for word in words_in(sent)):
        yield Match(node, LOOK, written(sent))


def leaves_early(node: ast.AST, at: Place) -> Iterator[Match]:
    """A rank without tokens returns before a collective that the others enter."""
    if not isinstance(node, ast.If) or at.function is None or not _asks_for_rows(node.test):
        return
    if not any(word in name.lower() for name in at.names for word in _OF_LAYERS):
        return
    is_left = isinstance(node.body[-1], ast.Return)
    if is_left and not at.file.collective_in(node):
        for inner in inside(at.function):
            is_after = getattr(inner, "lineno", 0) > (node.end_lineno or node.lineno)
            if isinstance(inner, ast.Call) and is_after and _communicates(inner, at):
                yield Match(node, LIKELY)
                return


def _communicates(call: ast.Call, at: Place) -> bool:
    name = at.name_of(call.func) or ast.unparse(call.func)
    words = ("all_to_all", "reduce_scatter", "all_gather", "all_reduce")
    return any(word in last(name) for word in words)


def _asks_for_rows(test: ast.expr) -> bool:
    """`x.shape[0] == 0`, `x.numel() == 0`, `not x.numel()`, `num_tokens == 0`."""
    match test:
        case ast.Compare(left=asked, ops=[ast.Eq()], comparators=[ast.Constant(value=0)]):
            pass
        case ast.UnaryOp(op=ast.Not(), operand=ast.Call() as asked):
            pass
        case _:
            return False
    text = ast.unparse(asked)
    words = (".numel()", ".shape[0]", ".size(0)", "num_tokens", "n_received", "num_recv")
    return text.endswith(words) or text.startswith(words)
