"""Goes through a file from top to bottom, keeps what names are bound to, asks the rules."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from spmd_moe.lint.place import Class, File, Function, Place, reduce_op
from spmd_moe.lint.record import Match
from spmd_moe.lint.rule import Rule
from spmd_moe.lint.trees import argument, inside, last
from spmd_moe.lint.values import PLACED, Fact, Values, by_name
from spmd_moe.lint.words import DIST, NOT_TRAINED, NOT_TRAINED_THERE, SUMMING

_OFF = ("no_grad", "inference_mode", "_disable_grad")
_OF_CLASS = Fact.RANK | Fact.RANKS | Fact.DTENSOR | Fact.TRAINED | PLACED
_BODIES = ("body", "orelse", "finalbody")


class Walk:
    """One walk through one file, for the rules that the file may break."""

    def __init__(self, file: File, rules: Iterable[Rule]) -> None:
        self._file = file
        self._values = Values(file.imports)
        self._around = Class()
        self._functions: tuple[Function, ...] = ()
        self._no_grad = not file.is_trained
        self._rules: dict[type[ast.AST], list[Rule]] = defaultdict(list)
        for rule in rules:
            for kind in rule.on:
                self._rules[kind].append(rule)
        self._found: list[tuple[Rule, Match, ast.stmt]] = []

    def run(self) -> list[tuple[Rule, Match, ast.stmt]]:
        self._block(self._file.tree.body)
        return self._found

    def _block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._ask(node, node)
                self._function(node)
            case ast.ClassDef():
                self._class(node)
            case ast.If(test=test):
                self._ask(node, node)
                self._expressions([test], node)
                self._branches(node)
            case ast.For() | ast.AsyncFor():
                self._expressions([node.iter], node)
                self._bind(node.target, self._values.of(node.iter) & ~Fact.PLAIN)
                self._ask(node, node)
                self._inner(node)
            case ast.With() | ast.AsyncWith():
                self._with(node)
            case ast.While() | ast.Try() | ast.TryStar() | ast.Match():
                self._expressions(_expressions_of(node), node)
                self._inner(node)
            case _:
                self._ask(node, node)
                self._expressions(_expressions_of(node), node)
                self._effects(node)

    def _inner(self, node: ast.stmt) -> None:
        for name in _BODIES:
            self._block(getattr(node, name, []))
            for part in getattr(node, "handlers", []) if name == "body" else []:
                self._block(part.body)
        for case in getattr(node, "cases", []):
            self._block(case.body)

    def _branches(self, node: ast.If) -> None:
        """Both branches start from what is known here; afterwards either may be true."""
        before = dict(self._values.bound)
        for name in _asked_for_dtensor(node.test):
            self._values.bound[name] = before.get(name, Fact.NONE) | Fact.DTENSOR
        self._block(node.body)
        after = self._values.bound
        self._values.bound = dict(before)
        self._block(node.orelse)
        if _leaves(node.body):
            return
        for name, known in after.items():
            self._values.bound[name] = self._values.bound.get(name, Fact.NONE) | known

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        self._expressions([item.context_expr for item in node.items], node)
        before = self._no_grad
        self._no_grad |= any(self._is_off(item.context_expr) for item in node.items)
        self._block(node.body)
        self._no_grad = before

    def _is_off(self, node: ast.expr) -> bool:
        """Whether a context or decorator switches gradients off."""
        call = node.func if isinstance(node, ast.Call) else node
        name = last(self._file.imports.name_of(call))
        if name == "set_grad_enabled" and isinstance(node, ast.Call):
            value = argument(node, 0, "mode")
            return isinstance(value, ast.Constant) and value.value is False
        return name in _OFF

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._expressions([*node.decorator_list, *node.args.defaults], node)
        outside = (self._values.bound, self._no_grad, self._functions)
        self._values.bound = dict(self._values.bound)
        if self._around.known and not self._functions:
            self._values.bound.update(self._around.known)
        self._functions = (*self._functions, node)
        self._no_grad = (
            self._no_grad
            or any(self._is_off(one) for one in node.decorator_list)
            or self._around.is_function
            or _has_own_backward(node)
            or NOT_TRAINED.search(node.name) is not None
        )
        self._arguments(node)
        self._block(node.body)
        self._values.bound, self._no_grad, self._functions = outside

    def _arguments(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Forget what names meant outside, and read what annotations tell."""
        computes = node.name == "forward" and self._around.is_module
        arguments = node.args
        for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            said = ast.unparse(one.annotation) if one.annotation is not None else ""
            known = Fact.NONE
            if "DTensor" in said and "|" not in said:
                known |= Fact.DTENSOR
            if said in ("int", "bool", "str", "float", "torch.device", "int | None"):
                known |= Fact.PLAIN
            elif computes and one.arg != "self" and not by_name(one.arg) & Fact.PLAIN:
                known |= Fact.COMPUTED
            self._values.bound[one.arg] = known

    def _class(self, node: ast.ClassDef) -> None:
        outside = (self._around, self._no_grad)
        bases = tuple(self._file.imports.name_of(base) for base in node.bases)
        self._around = Class(bases)
        if any(NOT_TRAINED_THERE.search(name) for name in (*bases, node.name)):
            self._no_grad = True
        for inner in inside(node):
            self._of_class(inner)
        self._block(node.body)
        self._around, self._no_grad = outside

    def _of_class(self, node: ast.AST) -> None:
        """Read what `self.x = ...` and `register_buffer` tell all methods of a class."""
        if isinstance(node, ast.Call) and last(ast.unparse(node.func)) == "register_buffer":
            name = argument(node, 0, "name")
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self._around.buffers.add(name.value)
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            for target, value in _pairs(node.targets[0], node.value):
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    known = Values(self._file.imports).of(value) & _OF_CLASS
                    if not known & Fact.DTENSOR:  # a layout that a caller may replace
                        known &= ~PLACED
                    if target.value.id == "self" and known:
                        name = f"self.{target.attr}"
                        known |= self._around.known.get(name, Fact.NONE)
                        self._around.known[name] = known

    def _expressions(self, nodes: Sequence[ast.expr], statement: ast.stmt) -> None:
        for node in nodes:
            inner = list(inside(node))
            for one in inner:
                if isinstance(one, ast.comprehension):
                    self._bind(one.target, self._values.of(one.iter) & ~Fact.PLAIN)
            for one in inner:
                self._ask(one, statement)
            for one in inner:
                if isinstance(one, ast.Call):
                    self._summed_in_place(one)

    def _ask(self, node: ast.AST, statement: ast.stmt) -> None:
        rules = self._rules.get(type(node))
        if not rules:
            return
        place = Place(
            self._file,
            self._values,
            self._around,
            self._functions,
            statement,
            self._no_grad,
        )
        for rule in rules:
            for match in rule.match(node, place):
                self._found.append((rule, match, statement))

    def _summed_in_place(self, call: ast.Call) -> None:
        name = self._file.imports.name_of(call.func)
        if name.startswith(DIST) and last(name) in SUMMING and self._sums(call):
            target = argument(call, 0, "tensor", "output")
            if target is not None:
                self._bind(target, self._values.of(target) | Fact.REDUCED)

    def _sums(self, call: ast.Call) -> bool:
        return reduce_op(call, self._file) in ("", "SUM", "AVG")

    def _effects(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            known = self._values.of(node.value)
            for target in node.targets:
                self._bind(target, known, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._bind(node.target, self._values.of(node.value))
        elif isinstance(node, ast.AugAssign):
            operation = ast.BinOp(node.target, node.op, node.value)
            self._bind(node.target, self._values.of(operation))

    def _bind(self, target: ast.AST, known: Fact, value: ast.expr | None = None) -> None:
        match target:
            case ast.Name(id=name):
                self._values.bound[name] = known
            case ast.Attribute():
                self._values.bound[ast.unparse(target)] = known
            case ast.Tuple() | ast.List():
                for part, own in _pairs(target, value):
                    self._bind(part, known if own is value else self._values.of(own))
            case ast.Starred(value=inner):
                self._bind(inner, known)
            case _:
                pass


def _pairs(
    target: ast.AST, value: ast.expr | None
) -> list[tuple[ast.AST, ast.expr | None]]:
    """Return each target with its own value, or with the whole where it is not written."""
    if not isinstance(target, ast.Tuple | ast.List):
        return [(target, value)]
    values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
    if len(values) == len(target.elts):
        return list(zip(target.elts, values, strict=True))
    return [(part, value) for part in target.elts]


def _has_own_backward(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether autograd does not look inside: a custom op, or a function with a `ctx`."""
    marks = ("custom_op", "library.impl", "register_fake", "register_kernel")
    names = [ast.unparse(one) for one in node.decorator_list]
    first = node.args.args[0].arg if node.args.args else ""
    return first == "ctx" or any(mark in name for name in names for mark in marks)


def _expressions_of(node: ast.AST) -> list[ast.expr]:
    """The expressions right below a statement, in the order in which they stand."""
    found: Iterator[ast.AST] = ast.iter_child_nodes(node)
    return [one for one in found if isinstance(one, ast.expr)]


def _asked_for_dtensor(test: ast.expr) -> list[str]:
    """Return x for `isinstance(x, DTensor)`, also in an `and`."""
    parts = test.values if isinstance(test, ast.BoolOp) else [test]
    found: list[str] = []
    for part in parts:
        match part:
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), kind]):
                if "DTensor" in ast.unparse(kind):
                    found.append(name)
            case _:
                pass
    return found


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
