"""What is saved, and buffers that are replaced."""

import ast
from collections.abc import Iterator

from spmd_moe.lint.place import Place
from spmd_moe.lint.record import LIKELY, LOOK, Match
from spmd_moe.lint.trees import argument, inside, words_in, written
from spmd_moe.lint.values import Fact


def saved(node: ast.AST, at: Place) -> Iterator[Match]:
    """A state dict of one rank, written as if it were that of the model."""
    if not isinstance(node, ast.Call):
        return
    name = at.name_of(node.func)
    is_torch = name == "torch.save"
    is_dcp = name in (
        "torch.distributed.checkpoint.save",
        "torch.distributed.checkpoint.async_save",
        "torch.distributed.checkpoint.save_state_dict",
    )
    if not (is_torch or is_dcp) or not at.file.has_ranks:
        return
    state = argument(node, 0, "state_dict", "obj")
    if state is None or not _is_state_of_model(state, at):
        return
    if at.file.cuts_experts:
        yield Match(node, LIKELY if is_torch else LOOK, written(state))
    elif is_torch:
        yield Match(node, LOOK, written(state))


def _is_state_of_model(node: ast.expr, at: Place) -> bool:
    """Whether parameters or moments are in it; schedulers and scalers are on every rank."""
    words = {word.lower() for word in words_in(node)}
    if any(part in w for w in words for part in ("scheduler", "scaler", "rng", "sampler")):
        return False
    return any(at.of(one) & Fact.STATE for one in inside(node) if isinstance(one, ast.expr))


def local_names(node: ast.AST, at: Place) -> Iterator[Match]:
    """`f"experts.{i}"` where i counts the experts of this rank."""
    if not isinstance(node, ast.comprehension | ast.For | ast.AsyncFor):
        return
    counted = node.iter
    if not isinstance(counted, ast.Call) or not isinstance(counted.func, ast.Name):
        return
    if counted.func.id not in ("enumerate", "range") or not counted.args:
        return
    if not any("local" in w and "expert" in w for w in words_in(counted.args[-1])):
        return
    target = node.target
    index = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
    if isinstance(index, ast.Name):
        for inner in inside(at.statement):
            if isinstance(inner, ast.JoinedStr) and _names_expert(inner, index.id):
                yield Match(inner, LIKELY, index.id)


def _names_expert(text: ast.JoinedStr, index: str) -> bool:
    before = ""
    for part in text.values:
        if isinstance(part, ast.Constant):
            before = str(part.value)
        elif isinstance(part, ast.FormattedValue):
            is_index = isinstance(part.value, ast.Name) and part.value.id == index
            if is_index and before.rstrip("._").endswith(("experts", "expert")):
                return True
    return False


def replaced(node: ast.AST, at: Place) -> Iterator[Match]:
    """`self.bias = self.bias + delta` of a buffer: whoever held it keeps the old one."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return
    target = node.targets[0]
    if not isinstance(target, ast.Attribute) or not at.names or at.names[0] == "__init__":
        return
    is_buffer = ast.unparse(target.value) == "self" and target.attr in at.around.buffers
    is_bias = "expert_bias" in target.attr
    if not (is_buffer or is_bias) or not isinstance(node.value, ast.BinOp):
        return
    if ast.unparse(target) in {ast.unparse(n) for n in inside(node.value)}:
        yield Match(node, LIKELY, written(target))
