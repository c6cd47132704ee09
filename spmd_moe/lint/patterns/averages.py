"""Averages: over ranks, and over the tokens of one rank."""

import ast
from collections.abc import Iterator

from spmd_moe.lint.place import Place, is_collective, reduce_op
from spmd_moe.lint.record import LIKELY, LOOK, Match
from spmd_moe.lint.trees import argument, inside, last, words_in, written
from spmd_moe.lint.values import Fact

# Where the placements of a tensor are said, in the code of users.
_PLACED = ("from_local", "redistribute", "local_map", "to_local")
_SHARDS = (
    "torch.distributed.fsdp.fully_shard",
    "torch.distributed._composable.fsdp.fully_shard",
)
_FACTORS = {
    "set_gradient_divide_factor", "set_reduce_scatter_divide_factor",
    "set_gradient_reduce_divide_factor",
}  # fmt: skip


def averaged(node: ast.AST, at: Place) -> Iterator[Match]:
    """`ReduceOp.AVG`, `Partial("avg")`, or a division by how many ranks there are."""
    if isinstance(node, ast.Call):
        name = at.name_of(node.func)
        if is_collective(name) and reduce_op(node, at.file) == "AVG":
            sent = argument(node, 0, "tensor", "self")
            if not _is_only_shown(sent, at):
                yield Match(node, _how(sent, at), written(sent))
        elif last(name) in _PLACED or _is_method(node, *_PLACED):
            if any(_is_average(part, at) for one in _given(node) for part in inside(one)):
                yield Match(node, LIKELY)
        elif last(name) in ("div_", "div") or _is_method(node, "div_", "div"):
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            yield from _divided(node, owner, argument(node, 0), at)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        yield from _divided(node, node.left, node.right, at)
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        yield from _divided(node, node.target, node.value, at)


def _given(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *(keyword.value for keyword in node.keywords)]


def _is_average(node: ast.AST, at: Place) -> bool:
    """`Partial("avg")`."""
    if not isinstance(node, ast.Call) or last(at.name_of(node.func)) != "Partial":
        return False
    op = argument(node, 0, "reduce_op")
    return isinstance(op, ast.Constant) and op.value == "avg"


def _is_method(node: ast.Call, *names: str) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr in names


def _divided(
    node: ast.AST, what: ast.expr | None, by: ast.expr | None, at: Place
) -> Iterator[Match]:
    """`x /= world_size` of a sum over ranks, or of a gradient or loss."""
    if what is None or not at.of(by) & Fact.RANKS or _is_only_shown(what, at):
        return
    known = at.of(what)
    is_sum = known & (Fact.REDUCED | Fact.GRADIENT)
    if is_sum or (isinstance(what, ast.Call) and is_collective(at.name_of(what.func))):
        yield Match(node, _how(what, at), written(what))


def _is_only_shown(value: ast.expr | None, at: Place) -> bool:
    """Whether it is a time, a size or the like, and neither a gradient nor a loss."""
    known = at.of(value)
    if value is None or not known & Fact.PLAIN or known & Fact.GRADIENT:
        return False
    return not any(w in name for name in words_in(value) for w in ("loss", "grad"))


def _how(value: ast.expr | None, at: Place) -> str:
    if value is None:
        return LOOK
    words = words_in(value)
    if at.of(value) & Fact.GRADIENT or any("grad" in word for word in words):
        return LIKELY
    return LIKELY if any("loss" in word for word in words) and not at.no_grad else LOOK


def divided_bias(node: ast.AST, at: Place) -> Iterator[Match]:
    """`bias / tp_size`, so that the sum over ranks makes it whole again."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
        return
    is_bias = any("bias" in word for word in words_in(node.left))
    if is_bias and at.of(node.right) & Fact.RANKS:
        yield Match(node, LIKELY, written(node.left))


def factor(node: ast.AST, at: Place) -> Iterator[Match]:
    """A divide factor of FSDP2 other than one, or none where experts are sharded."""
    if not isinstance(node, ast.Call):
        return
    if at.name_of(node.func) in _SHARDS and not at.file.sets_factor:
        mesh = argument(node, 99, "mesh")
        said = [*(inside(mesh) if mesh is not None else []), *node.args]
        if any(_is_of_experts(one) for one in said):
            yield Match(node, LIKELY)
        return
    if not _is_method(node, *_FACTORS):
        return
    if _FACTORS & set(at.names):
        return  # its own definition
    given = argument(node, 0, "factor")
    is_one = isinstance(given, ast.Constant) and given.value == 1
    if given is not None and not is_one:
        yield Match(node, LIKELY, written(given))


def _is_of_experts(node: ast.AST) -> bool:
    """Whether a mesh or module is that of experts, by its name."""
    name = node.value if isinstance(node, ast.Constant) else last(ast.unparse(node))
    marks = ("edp", "efsdp", "expert")
    return isinstance(name, str) and any(mark in name.lower() for mark in marks)


def local_mean(node: ast.AST, at: Place) -> Iterator[Match]:
    """A mean over the tokens of this rank, which is then summed or averaged over ranks."""
    if not isinstance(node, ast.Call):
        return
    name = at.name_of(node.func)
    value: ast.expr | None = None
    if is_collective(name) and "all_reduce" in name:
        value = argument(node, 0, "tensor", "self", "input")
    elif name.endswith("DTensor.from_local"):
        placements = argument(node, 2, "placements")
        value = argument(node, 0) if at.of(placements) & Fact.PENDING else None
    if value is not None and at.of(value) & Fact.MEAN and not at.of(value) & Fact.REDUCED:
        yield Match(node, LOOK if at.no_grad else LIKELY, written(value))
