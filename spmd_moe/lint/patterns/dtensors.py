"""Where DTensor is entered and left, and what is written into one."""

import ast
from collections.abc import Iterator

from spmd_moe.lint.place import Place
from spmd_moe.lint.record import CERTAIN, LIKELY, LOOK, Match
from spmd_moe.lint.trees import argument, inside, last, written
from spmd_moe.lint.values import PLACED, Fact
from spmd_moe.lint.words import DTENSOR

# What is asked of a local tensor without computing with it.
_ASKED = {
    "shape", "device", "dtype", "stride", "data_ptr", "numel", "size", "dim", "detach",
    "is_contiguous", "untyped_storage", "element_size", "requires_grad", "data", "item",
    "ndim", "layout", "tolist", "storage_offset",
}  # fmt: skip
_IN_PLACE = {
    "scatter_", "scatter_add_", "scatter_reduce_", "index_add_", "index_copy_",
    "index_fill_", "index_put_", "masked_scatter_", "put_",
}  # fmt: skip


def left(node: ast.AST, at: Place) -> Iterator[Match]:
    """`x.to_local()` whose gradient nobody named."""
    owner = _left_by("to_local", node, at)
    if owner is None or argument(node, 0, "grad_placements") is not None:  # type: ignore[arg-type]
        return
    known = at.of(owner)
    if known & PLACED and not known & Fact.REPLICATED:
        return  # a piece has a piece for its gradient, a summand a whole one
    is_used = known & Fact.REPLICATED and not at.returns
    yield Match(node, LIKELY if is_used else LOOK, written(owner))


def gathered(node: ast.AST, at: Place) -> Iterator[Match]:
    """`x.full_tensor()` in a forward, whose gradient nobody named."""
    owner = _left_by("full_tensor", node, at)
    if owner is None or argument(node, 0, "grad_placements") is not None:  # type: ignore[arg-type]
        return
    known = at.of(owner)
    is_seen = at.is_forward or known & (Fact.DTENSOR | Fact.TRAINED | Fact.COMPUTED)
    if is_seen:
        is_used = at.gradient(owner) is not None and not at.returns
        yield Match(node, LIKELY if is_used else LOOK, written(owner))


def _left_by(method: str, node: ast.AST, at: Place) -> ast.expr | None:
    """Return x of `x.method()` if a gradient may flow through the call."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    if node.func.attr != method or at.no_grad or at.function is None:
        return None
    owner = node.func.value
    if at.of(owner) & (Fact.PLAIN | Fact.GRADIENT) or _only_asked(node, at.statement):
        return None
    return owner


def _only_asked(call: ast.Call, statement: ast.stmt) -> bool:
    """Whether the result is asked for its shape and the like, or detached at once."""
    for node in inside(statement):
        if isinstance(node, ast.Attribute) and node.value is call:
            return node.attr in _ASKED
        if isinstance(node, ast.Compare | ast.Assert) and call in inside(node):
            return True
    return False


def entered(node: ast.AST, at: Place) -> Iterator[Match]:
    """`DTensor.from_local` of a piece, without the global shape and stride."""
    if not isinstance(node, ast.Call):
        return
    if not at.name_of(node.func).endswith("DTensor.from_local"):
        return
    if argument(node, 4, "shape") is not None and argument(node, 5, "stride") is not None:
        return
    placements = argument(node, 2, "placements")
    if at.of(placements) & Fact.SHARDED:
        local = argument(node, 0, "local_tensor")
        yield Match(node, LOOK, written(local))


def mapped(node: ast.AST, at: Place) -> Iterator[Match]:
    """`local_map` without the placements of the gradients of its arguments."""
    if not isinstance(node, ast.Call):
        return
    if at.name_of(node.func) != f"{DTENSOR}experimental.local_map":
        return
    grads = argument(node, 3, "in_grad_placements")
    ins = argument(node, 2, "in_placements")
    known = at.of(ins) & PLACED
    if grads is None or _is_none(grads):
        if known == Fact.SHARDED or known == Fact.PENDING or at.no_grad:
            return
        yield Match(node, LIKELY if known & Fact.REPLICATED else LOOK)
    elif isinstance(grads, ast.IfExp) and (_is_none(grads.body) or _is_none(grads.orelse)):
        yield Match(node, LIKELY)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def written_into(node: ast.AST, at: Place) -> Iterator[Match]:
    """A scatter in place into a DTensor."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = node.func.value
        known = at.of(owner)
        if node.func.attr in _IN_PLACE and known & Fact.DTENSOR:
            yield Match(node, _how(known), written(owner))
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and at.of(target.value) & Fact.DTENSOR:
                is_listed = isinstance(node.value, ast.Constant)
                if _by_index(target.slice) and not is_listed:
                    yield Match(node, LOOK, written(target.value))


def _how(known: Fact) -> str:
    return CERTAIN if known & Fact.SHARDED else LIKELY


def _by_index(node: ast.expr) -> bool:
    """Whether a subscript is by a tensor, not by numbers, slices or names in quotes."""
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return not all(isinstance(p, ast.Slice | ast.Constant) for p in parts) and any(
        isinstance(p, ast.Name | ast.Attribute)
        and last(ast.unparse(p)).endswith(("ids", "idx", "index", "indices", "mask"))
        for p in parts
    )
