"""Gradients that are reduced, flagged or clipped by hand."""

import ast
from collections.abc import Iterator

from spmd_moe.lint.place import Place, is_collective
from spmd_moe.lint.record import LIKELY, LOOK, Match
from spmd_moe.lint.trees import argument, last, texts_compared_in, words_in, written
from spmd_moe.lint.values import Fact
from spmd_moe.lint.words import FLAGS, PARAMETERS, SUMMING

_HOOKS = {
    "register_hook", "register_post_accumulate_grad_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook", "register_backward_hook",
}  # fmt: skip


def hooked(node: ast.AST, at: Place) -> Iterator[Match]:
    """A hook on a gradient that communicates."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    if node.func.attr not in _HOOKS or not node.args:
        return
    body: ast.AST | None = node.args[0]
    if (
        isinstance(body, ast.Call)
        and body.args
        and last(at.name_of(body.func)) == "partial"
    ):
        body = body.args[0]
    if isinstance(body, ast.Name | ast.Attribute):
        body = at.file.function(last(ast.unparse(body)))
    if body is not None and at.file.collective_in(body):
        yield Match(node, LIKELY, written(node.func.value))


def by_hand(node: ast.AST, at: Place) -> Iterator[Match]:
    """A collective on `.grad`, outside of the code that owns it."""
    if not isinstance(node, ast.Call):
        return
    name = at.name_of(node.func)
    if not is_collective(name) or last(name).lstrip("_") not in SUMMING:
        return
    sent = argument(node, 1 if "scatter" in name else 0, "tensor", "input")
    if sent is not None and at.of(sent) & Fact.GRADIENT:
        yield Match(node, LIKELY, written(sent))


def flagged(node: ast.AST, at: Place) -> Iterator[Match]:
    """`getattr(param, "sequence_parallel", False)`: a flag decides who is reduced."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return
    if node.func.id not in ("getattr", "hasattr", "setattr") or len(node.args) < 2:
        return
    owner, flag = node.args[0], node.args[1]
    is_flag = isinstance(flag, ast.Constant) and flag.value in FLAGS
    if is_flag and PARAMETERS.search(last(ast.unparse(owner))):
        yield Match(node, LIKELY, written(owner))


def clipped(node: ast.AST, at: Place) -> Iterator[Match]:
    """torch's norm of gradients, which knows of no mesh but those of DTensors."""
    if not isinstance(node, ast.Call):
        return
    name = at.name_of(node.func)
    if name.startswith("torch.nn.utils."):
        if last(name) not in ("clip_grad_norm_", "clip_grad_norm", "get_total_norm"):
            return
    else:
        return
    if at.file.cuts_experts and not _are_sorted(at):
        yield Match(node, LIKELY)
    elif at.file.has_ranks and not at.file.cuts_experts:
        yield Match(node, LOOK)


def _are_sorted(at: Place) -> bool:
    """Whether the function around tells expert parameters from the others."""
    if at.function is None:
        return False
    words = words_in(at.function) | texts_compared_in(at.function)
    return any("ep" in word.split("_") or "expert" in word for word in words)
