"""What the source tells of a value: light data flow inside one function.

Facts only say what is seen. A value without facts may be anything.
"""

import ast
import enum
from typing import cast

from spmd_moe.lint.imports import Imports
from spmd_moe.lint.trees import argument, last, words_in
from spmd_moe.lint.words import (
    COMPUTES,
    DTENSOR,
    GRADIENTS,
    INTEGERS,
    LIKE_THEIR_TENSOR,
    LOCALS,
    MEANS,
    RANK,
    RANKS,
    STATES,
    WITHOUT_GRADIENT,
)


class Fact(enum.IntFlag):
    NONE = 0
    DTENSOR = enum.auto()
    REPLICATED = enum.auto()  # a placement of it, or of a list of placements
    SHARDED = enum.auto()
    PENDING = enum.auto()
    TRAINED = enum.auto()  # has a gradient
    COMPUTED = enum.auto()  # comes from what usually has one
    PLAIN = enum.auto()  # has none: detached, counted, compared
    GRADIENT = enum.auto()  # is one
    MEAN = enum.auto()  # a sum over a count, both of this rank
    COUNT = enum.auto()
    REDUCED = enum.auto()
    RANK = enum.auto()
    RANKS = enum.auto()  # how many there are
    OFFSET = enum.auto()  # a rank times something
    SIZE = enum.auto()
    STATE = enum.auto()  # a state dict that was just made
    EXTRA = enum.auto()  # a bias or the like was added to a product


PLACED = Fact.REPLICATED | Fact.SHARDED | Fact.PENDING
# What goes on through an op of several operands.
_FLOWS = (
    PLACED | Fact.DTENSOR | Fact.TRAINED | Fact.COMPUTED | Fact.MEAN | Fact.EXTRA
    | Fact.REDUCED | Fact.GRADIENT
)  # fmt: skip
_PLACEMENTS = {
    "Replicate": Fact.REPLICATED,
    "Shard": Fact.SHARDED,
    "_StridedShard": Fact.SHARDED,
    "Partial": Fact.PENDING,
    "_Partial": Fact.PENDING,
}
_OF_GRADIENT = Fact.TRAINED | Fact.COMPUTED | Fact.PLAIN
_EXTRA = ("bias", "residual", "shared")


class Values:
    """Facts of expressions, given what names are bound to at this point."""

    def __init__(self, imports: Imports) -> None:
        self.imports = imports
        self.bound: dict[str, Fact] = {}
        self._known: dict[ast.AST, Fact] = {}

    def of(self, node: ast.AST | None) -> Fact:
        """Return what is known of an expression; each is asked for in its turn."""
        if node is None:
            return Fact.NONE
        if node not in self._known:
            self._known[node] = self._of(node)
        return self._known[node]

    def _of(self, node: ast.AST) -> Fact:
        match node:
            case ast.Name(id=name):
                return self.bound.get(name, Fact.NONE) | by_name(name)
            case ast.Attribute():
                return self._of_attribute(node)
            case ast.Call():
                return self._of_call(node)
            case ast.BinOp(left=left, op=op, right=right):
                return self._of_operation(left, op, right)
            case ast.Compare() | ast.BoolOp(op=ast.And()) | ast.Constant():
                return Fact.PLAIN
            case ast.UnaryOp(operand=operand):
                return self.of(operand)
            case ast.BoolOp(values=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
                return self._together(parts)
            case ast.IfExp(body=body, orelse=orelse):
                return self._together([body, orelse])
            case ast.ListComp(elt=each) | ast.GeneratorExp(elt=each):
                return self.of(each)
            case ast.Subscript(value=value):
                return self._of_piece(value)
            case ast.Starred(value=value) | ast.NamedExpr(value=value):
                return self.of(value)
            case _:
                return Fact.NONE

    def _together(self, parts: list[ast.expr]) -> Fact:
        found = Fact.NONE
        is_plain = bool(parts)
        for part in parts:
            found |= self.of(part)
            is_plain = is_plain and bool(self.of(part) & Fact.PLAIN)
        return found if is_plain else found & ~Fact.PLAIN

    def _of_attribute(self, node: ast.Attribute) -> Fact:
        known = (
            self.bound.get(ast.unparse(node), Fact.NONE) if _is_self(node) else Fact.NONE
        )
        base = self.of(node.value)
        if node.attr == "grad":
            return Fact.GRADIENT | Fact.PLAIN | (base & (Fact.DTENSOR | PLACED))
        if node.attr in ("data", "_local_tensor"):
            return Fact.PLAIN
        if node.attr in ("T", "mT", "H"):
            return base
        if node.attr in ("placements", "_spec"):
            return base & PLACED
        if node.attr in ("shape", "device", "dtype", "ndim", "requires_grad"):
            return Fact.PLAIN
        return known | by_name(node.attr)

    def _of_piece(self, value: ast.expr) -> Fact:
        if isinstance(value, ast.Attribute) and value.attr == "shape":
            return Fact.SIZE | Fact.PLAIN
        return self.of(value)

    def _of_operation(self, left: ast.expr, op: ast.operator, right: ast.expr) -> Fact:
        here, there = self.of(left), self.of(right)
        found = (here | there) & _FLOWS
        if isinstance(op, ast.MatMult):
            return found | Fact.COMPUTED
        if here & Fact.PLAIN and there & Fact.PLAIN:
            found |= Fact.PLAIN
        if isinstance(op, ast.Div) and there & Fact.COUNT and not there & Fact.REDUCED:
            found |= Fact.MEAN
        if isinstance(op, ast.Mult) and (here | there) & Fact.RANK:
            found |= Fact.OFFSET
        if isinstance(op, ast.Add | ast.Sub):
            found |= (here | there) & Fact.OFFSET
        if isinstance(op, ast.Mult | ast.FloorDiv):
            found |= (here | there) & Fact.SIZE
        if isinstance(op, ast.Add):
            for part, other in ((left, here | there), (right, here | there)):
                is_extra = any(w in name for name in words_in(part) for w in _EXTRA)
                if is_extra and other & Fact.COMPUTED:
                    found |= Fact.EXTRA
        return found

    def _of_call(self, node: ast.Call) -> Fact:
        name = self.imports.name_of(node.func)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        special = self._of_special(node, name or method, method)
        if special is not None:
            return special
        is_method = bool(method) and not name.startswith(("torch.", "funcol."))
        owner = cast(ast.Attribute, node.func).value if is_method else None
        parts = [*([owner] if owner is not None else []), *node.args]
        taken = self._together(parts)
        if owner is not None:  # its arguments are settings, as in x.softmax(-1)
            taken = taken & ~Fact.PLAIN | self.of(owner) & Fact.PLAIN
        elif not name.startswith("torch."):
            taken &= ~Fact.PLAIN
        what = name or method
        if WITHOUT_GRADIENT.search(what):
            kept = taken & (Fact.DTENSOR | PLACED) if LIKE_THEIR_TENSOR.search(what) else 0
            return Fact(Fact.PLAIN | kept)
        found = taken & (Fact.TRAINED | Fact.COMPUTED | Fact.MEAN | Fact.EXTRA | Fact.PLAIN)
        is_of_tensors = is_method or name.startswith("torch.")
        if is_of_tensors or LIKE_THEIR_TENSOR.search(what):
            found |= taken & (Fact.DTENSOR | PLACED)
        if LOCALS.search(what) or LIKE_THEIR_TENSOR.search(what):
            found |= taken & Fact.GRADIENT
        if COMPUTES.search(what) and not taken & Fact.PLAIN:
            found |= Fact.COMPUTED
        reduction = argument(node, 99, "reduction")
        if MEANS.search(what) and not isinstance(reduction, ast.Constant):
            found |= Fact.MEAN
        if last(what) == "sum" and owner is not None and _counts(owner):
            found |= Fact.COUNT
        return found

    def _of_special(self, node: ast.Call, name: str, method: str) -> Fact | None:
        """Calls that make or leave a DTensor, and those that tell who or how many."""
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if last(name) in _PLACEMENTS:
            return _PLACEMENTS[last(name)]
        if name.endswith("DTensor.from_local") or name.startswith(f"{DTENSOR}distribute_"):
            of = self.of(argument(node, 0, "local_tensor", "tensor"))
            placed = self.of(argument(node, 2, "placements")) & PLACED
            return (
                Fact.DTENSOR | placed | (of & (Fact.TRAINED | Fact.COMPUTED | Fact.PLAIN))
            )
        if method == "redistribute" and owner is not None:
            to = argument(node, 1, "placements") or argument(node, 0)
            kept = self.of(owner) & _OF_GRADIENT
            return Fact.DTENSOR | kept | (self.of(to) & PLACED)
        if method in ("to_local", "full_tensor") and owner is not None:
            return self.of(owner) & (_OF_GRADIENT | Fact.GRADIENT)
        if method == "requires_grad_":
            return (self.of(owner) & ~Fact.PLAIN) | Fact.TRAINED
        if last(name) == "Parameter":
            inner = self.of(argument(node, 0, "data")) & (Fact.DTENSOR | PLACED)
            return Fact.TRAINED | inner
        if last(name) in STATES:
            return Fact.STATE | Fact.PLAIN
        if last(name) == "size" and owner is not None:
            is_of_ranks = bool(words_in(owner) & {"mesh", "group", "device_mesh", "pg"})
            by_words = any(w.endswith(("mesh", "group")) for w in words_in(owner))
            return Fact.PLAIN | (Fact.RANKS if is_of_ranks or by_words else Fact.SIZE)
        told = by_name(last(name))
        return told | Fact.PLAIN if told & (Fact.RANK | Fact.RANKS) else None


def by_name(name: str) -> Fact:
    """Return what the name of a variable alone tells."""
    found = Fact.NONE
    if RANK.search(name):
        found |= Fact.RANK | Fact.PLAIN
    if RANKS.search(name):
        found |= Fact.RANKS | Fact.PLAIN
    if GRADIENTS.search(name):
        found |= Fact.GRADIENT | Fact.PLAIN
    if INTEGERS.search(name):
        found |= Fact.PLAIN
    return found


def _counts(node: ast.expr) -> bool:
    """Whether the sum of an expression is a count: of a mask, of valid tokens."""
    if isinstance(node, ast.Compare):
        return True
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return "mask" in name or "valid" in name


def _is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"
