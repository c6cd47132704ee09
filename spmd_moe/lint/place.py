"""Where a matcher looks: file, class and function around a node, and what is known."""

import ast
from dataclasses import dataclass, field

from spmd_moe.lint.imports import Imports
from spmd_moe.lint.record import CERTAIN, LIKELY
from spmd_moe.lint.trees import argument, inside, last
from spmd_moe.lint.values import Fact, Values
from spmd_moe.lint.words import DIST, EXPERTS_IN_USE, NOT_TRAINED_THERE, RANKS_IN_USE

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class File:
    """A parsed file, and what is true of it as a whole."""

    def __init__(self, text: str, tree: ast.Module, stem: str) -> None:
        self.tree = tree
        self.is_trained = NOT_TRAINED_THERE.search(stem) is None
        self.imports = Imports(tree)
        self.cuts_experts = EXPERTS_IN_USE.search(text) is not None
        self.sets_factor = "divide_factor(" in text
        self.has_ranks = RANKS_IN_USE.search(text) is not None
        self._functions: dict[str, Function] | None = None

    def function(self, name: str) -> Function | None:
        """Return a function of this file by its name alone."""
        if self._functions is None:
            self._functions = {
                node.name: node
                for node in inside(self.tree)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        return self._functions.get(name)

    def collective_in(self, node: ast.AST) -> str:
        """Return the first collective that is called inside; "" if there is none."""
        for inner in inside(node):
            if isinstance(inner, ast.Call):
                name = self.imports.name_of(inner.func)
                if is_collective(name):
                    return name
        return ""


def is_collective(name: str) -> bool:
    """Whether a dotted name is a collective of torch, or one of the usual wrappers."""
    head, _, tail = name.rpartition(".")
    words = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "allreduce")
    fits = any(tail.lstrip("_").startswith(word) for word in words)
    return fits and (f"{head}.".startswith((DIST, "funcol.", "torch.ops.")) or not head)


_OPS = ("sum", "avg", "max", "min", "product")


def reduce_op(node: ast.AST, file: File) -> str:
    """Return SUM, AVG, MAX, ... as a call writes it; "" if it does not."""
    if not isinstance(node, ast.Call):
        return ""
    op = argument(node, 99, "op", "reduceOp", "reduce_op")
    if op is None:
        for one in node.args[1:]:
            is_text = isinstance(one, ast.Constant) and one.value in _OPS
            if is_text or "ReduceOp." in file.imports.name_of(one):
                op = one
    if isinstance(op, ast.Constant) and isinstance(op.value, str):
        return op.value.upper()
    return last(file.imports.name_of(op).removesuffix(".name")) if op is not None else ""


@dataclass
class Class:
    """The class around: its bases as they are written, and its buffers."""

    bases: tuple[str, ...] = ()
    buffers: set[str] = field(default_factory=set[str])
    known: dict[str, Fact] = field(default_factory=dict[str, Fact])

    @property
    def is_module(self) -> bool:
        words = ("Module", "Layer", "Model", "MLP", "Attention", "Embedding", "Linear")
        return any(base.endswith(words) for base in self.bases)

    @property
    def is_function(self) -> bool:
        """An autograd function, whose author writes the backward."""
        return any(base.endswith("Function") for base in self.bases)


@dataclass(frozen=True)
class Place:
    """What a matcher may ask, at one node."""

    file: File
    values: Values
    around: Class
    functions: tuple[Function, ...]
    statement: ast.stmt
    no_grad: bool

    @property
    def function(self) -> Function | None:
        return self.functions[-1] if self.functions else None

    @property
    def names(self) -> list[str]:
        return [getattr(f, "name", "") for f in self.functions]

    @property
    def is_declared(self) -> bool:
        """Whether a region around says the types of what goes in and comes out."""
        for function in self.functions:
            for one in getattr(function, "decorator_list", []):
                call = one.func if isinstance(one, ast.Call) else one
                if self.name_of(call) in ("spmd_types.local_map", "placements.region"):
                    return True
        return False

    @property
    def is_forward(self) -> bool:
        return any(name in ("forward", "__call__") for name in self.names)

    def name_of(self, node: ast.AST) -> str:
        return self.file.imports.name_of(node)

    def of(self, node: ast.AST | None) -> Fact:
        return self.values.of(node)

    def gradient(self, node: ast.AST | None) -> str | None:
        """Return how sure it is that a gradient flows through; None if it is not."""
        known = self.of(node)
        if self.no_grad or known & Fact.PLAIN:
            return None
        if known & Fact.TRAINED:
            return CERTAIN
        return LIKELY if known & Fact.COMPUTED else None

    @property
    def returns(self) -> bool:
        return isinstance(self.statement, ast.Return)
