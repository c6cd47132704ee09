"""Which ways torch offers to call an op: overloads, functions, methods, operators.

Everything here is read from torch: the schemas of its operators, the signatures of its
Python functions, and the stand-ins of `torch.overrides` for what has neither. Of the
checker only the names of its ops are known.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from placements._torch import schemas_of
from placements.testing.forms.shapes import BY_NAME


@dataclass(frozen=True)
class FormSlot:
    """One argument of a signature; `kind` says what is drawn for it."""

    name: str
    kind: str
    required: bool
    keyword_only: bool = False


@dataclass(frozen=True)
class FormSignature:
    """One way to call an op.

    `head` is what stands before the arguments: `torch.sum`, or `.sum` of a method. An
    operator has a `pattern` instead, such as `{0} + {1}`. `writes` is the slot whose
    tensor the call writes to.
    """

    op: str
    overload: str
    head: str
    slots: tuple[FormSlot, ...]
    pattern: str = ""
    writes: str = ""

    def __str__(self) -> str:
        names = ", ".join(slot.name for slot in self.slots)
        return f"{self.pattern or self.head}({names})"


# Arguments of the interpreter's own overloads (of numbers, strings, lists), which share
# names with ops of tensors.
_OF_SCRIPTS = {"a", "b", "l", "list", "s", "key"}
# Arguments by which a form without tensors is known to make one.
_OF_FACTORIES = {"size", "end", "n", "window_length", "row"}
_OF_OTHERS = (
    "complex",
    "Dict",
    "AnyEnum",
    "List[t]",
    "List[str]",
    "List[float]",
    "List[bool]",
)
_NEVER_GIVEN = {
    "layout", "memory_format", "pin_memory", "generator", "non_blocking", "copy",
    "_stacklevel", "sparse", "names", "requires_grad",
    "path", "cudnn_enable", "implicit", "process_group", "async", "input_scale",
}  # fmt: skip
_DIMS = {
    "dim", "dims", "axis", "dim0", "dim1", "dim2", "axis0", "axis1", "start_dim", "end_dim",
    "source", "destination",
}  # fmt: skip
_SIZES = {"size", "shape", "sizes", "normalized_shape", "stride"}
_KINDS = {
    "Tensor": "tensor", "Optional[Tensor]": "tensor", "List[Tensor]": "tensors",
    "List[Optional[Tensor]]": "tensors", "number": "number", "Optional[number]": "number",
    "float": "number", "Optional[float]": "number", "int": "int", "Optional[int]": "int",
    "List[int]": "ints", "Optional[List[int]]": "ints", "bool": "flag",
    "Optional[bool]": "flag", "str": "text", "Optional[str]": "text", "Device": "device",
    "Optional[Device]": "device",
}  # fmt: skip
_INDICES = {"index", "indices", "offs"}
_MASKS = {"mask", "condition"}


def _kind(name: str, torch_type: str, op: str) -> str:
    if name in ("dtype", "out_dtype"):
        return "dtype"
    if name in _NEVER_GIVEN:
        return "never"
    kind = _KINDS.get(torch_type, "never")
    if kind == "tensor" and (name in _INDICES or (name, op) == ("target", "nll_loss")):
        return "index"
    if kind == "tensors" and name == "indices":
        return "indices"
    if kind == "tensor" and name in _MASKS:
        return "mask"
    if kind in ("int", "ints") and name in _DIMS:
        return (
            "repeats" if op in ("tile", "repeat") else {"int": "dim", "ints": "dims"}[kind]
        )
    if kind == "ints" and name in _SIZES:
        return "size"
    return kind


def _is_of_tensors(schema: Any) -> bool:
    names = {str(a.name) for a in schema.arguments}
    types = [str(a.type) for a in schema.arguments]
    plain = {str(a.name) for a in schema.arguments if str(a.type) != "Tensor"}
    if "fft_" in str(schema.name):
        plain -= {"s"}  # the sizes of fft2
    if plain & _OF_SCRIPTS or any(bad in t for t in types for bad in _OF_OTHERS):
        return False
    if "names" in names or any("Dimname" in t for t in types):
        return False
    return any("Tensor" in t for t in types) or bool(names & _OF_FACTORIES)


def _slots_of(schema: Any, op: str) -> tuple[FormSlot, ...]:
    return tuple(
        FormSlot(
            str(a.name),
            _kind(str(a.name), str(a.type), op),
            not a.has_default_value(),
            bool(a.kwarg_only),
        )
        for a in schema.arguments
    )


def _heads(name: str, slots: tuple[FormSlot, ...]) -> list[str]:
    """Return where torch has a function or method that takes a schema's arguments."""
    # torch.ops takes a tensor of one element for the number of a dtype.
    heads = [f"torch.ops.aten.{name}"] if name not in ("to", "view") else []
    if name == "_grouped_mm":
        return heads
    takes_tensor = bool(slots) and slots[0].kind in ("tensor", "mask")
    if (
        takes_tensor
        and slots[0].name in ("self", "input")
        and callable(getattr(Tensor, name, None))
    ):
        if not inspect.isfunction(getattr(Tensor, name)):
            heads.append(f".{name}")
    homes: list[tuple[str, Any]] = [("torch", torch), ("F", nn.functional)]
    for home, module in homes:
        found = getattr(module, name, None)
        if (
            callable(found)
            and not inspect.isfunction(found)
            and not isinstance(found, type)
        ):
            heads.append(f"{home}.{name}")
    for family, module in _FAMILIES:
        short = name.removeprefix(f"{family}_")
        if short != name and hasattr(module, short):
            heads.append(f"torch.{family}.{short}")
    return heads


_FAMILIES: tuple[tuple[str, Any], ...] = (
    ("special", torch.special), ("linalg", torch.linalg), ("fft", torch.fft),
)  # fmt: skip


def _from_schemas(op: str) -> list[FormSignature]:
    found: list[FormSignature] = []
    for name in (op, f"{op}_"):
        if name.startswith("__"):
            continue
        for schema in schemas_of(name):
            if not _is_of_tensors(schema):
                continue
            slots = _slots_of(schema, op)
            overload = f"{name}.{schema.overload_name or 'default'}"
            writes = ""
            if name.endswith("_") and slots:
                writes = slots[0].name
            elif any(slot.name == "out" for slot in slots):
                writes = "out"
            outputs = [
                s for s in slots if s.keyword_only and s.required and s.name != "out"
            ]
            if any(s.kind in ("tensor", "index") for s in outputs):
                continue  # several out= tensors, spelled as a tuple: not drawn
            heads = _heads(name, slots)
            if writes == "out":
                heads = [h for h in heads if not h.startswith(".")]
            found += [
                FormSignature(op, overload, head, slots, writes=writes) for head in heads
            ]
    return found


# What a stand-in says that no schema does, by name alone: `x.nonzero(as_tuple=True)`.
_ONLY_IN_PYTHON = {"as_tuple"}


def _python_slots(signature: inspect.Signature, op: str) -> tuple[FormSlot, ...]:
    slots: list[FormSlot] = []
    for p in signature.parameters.values():
        if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            continue
        torch_type = BY_NAME.get(p.name, "")
        if op == "tensordot" and p.name in ("a", "b"):
            torch_type = "Tensor"
        kind = _kind(p.name, torch_type, op)
        if op in ("cross_entropy", "nll_loss") and p.name == "target":
            kind = "index"
        if op == "embedding" and p.name == "input":
            kind = "index"
        required = p.default is p.empty
        by_name = p.kind is p.KEYWORD_ONLY or p.name in _ONLY_IN_PYTHON
        slots.append(FormSlot(p.name, kind, required, by_name))
    return tuple(slots)


def _from_python(op: str) -> list[FormSignature]:
    """Functions written in Python, and methods that only `torch.overrides` knows."""
    found: list[FormSignature] = []
    stand_ins = _stand_ins()
    homes: list[tuple[str, Any]] = [
        ("torch", torch),
        ("F", nn.functional),
        ("nn.init", nn.init),
        ("", Tensor),
    ]
    for home, module in homes:
        for name in (op, f"{op}_"):
            function: Any = getattr(module, name, None)
            if home == "nn.init" and not name.endswith("_"):
                continue
            if inspect.isfunction(function):
                given = inspect.signature(_dispatched(module, name, function))
            elif function in stand_ins and (
                (home == "" and not schemas_of(name))
                or _says_more(name, inspect.signature(stand_ins[function]))
            ):
                given = inspect.signature(stand_ins[function])
            else:
                continue
            if name.startswith("__"):
                continue
            slots = _python_slots(given, op)
            if op == "einsum":
                slots = ()
            writes = slots[0].name if name.endswith("_") and slots else ""
            found.append(
                FormSignature(op, f"{home}.{name}", f"{home}.{name}", slots, writes=writes)
            )
    return found


def _dispatched(module: Any, name: str, function: Any) -> Any:
    """Return what a function calls that takes anything: F.max_pool2d, F._max_pool2d."""
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    anything = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return getattr(module, f"_{name}", function) if kinds <= anything else function


def _says_more(name: str, given: inspect.Signature) -> bool:
    known = {str(a.name) for schema in schemas_of(name) for a in schema.arguments}
    return bool(given.parameters.keys() & _ONLY_IN_PYTHON - known)


@cache
def _stand_ins() -> dict[Callable[..., Any], Callable[..., Any]]:
    return cast(Any, torch.overrides).get_testing_overrides()


_OPERATORS: dict[str, tuple[str, ...]] = {
    "add": ("{0} + {1}", "{0} += {1}"), "__radd__": ("{1} + {0}",),
    "sub": ("{0} - {1}", "{0} -= {1}"), "__rsub__": ("{1} - {0}",), "rsub": ("{1} - {0}",),
    "mul": ("{0} * {1}", "{0} *= {1}"), "__rmul__": ("{1} * {0}",),
    "div": ("{0} / {1}", "{0} /= {1}"), "__rtruediv__": ("{1} / {0}",),
    "__rdiv__": ("{1} / {0}",),
    "floor_divide": ("{0} // {1}", "{0} //= {1}"), "__floordiv__": ("{0} // {1}",),
    "__rfloordiv__": ("{1} // {0}",), "pow": ("{0} ** {1}", "{0} **= {1}"),
    "__rpow__": ("{1} ** {0}",), "remainder": ("{0} % {1}", "{0} %= {1}"),
    "__mod__": ("{0} % {1}",), "__rmod__": ("{1} % {0}",), "matmul": ("{0} @ {1}",),
    "__rmatmul__": ("{1} @ {0}",), "eq": ("{0} == {1}",), "__eq__": ("{0} == {1}",),
    "ne": ("{0} != {1}",), "lt": ("{0} < {1}",), "le": ("{0} <= {1}",),
    "gt": ("{0} > {1}",),
    "ge": ("{0} >= {1}",), "neg": ("-{0}",), "positive": ("+{0}",), "abs": ("abs({0})",),
    "bitwise_not": ("~{0}",), "__invert__": ("~{0}",), "bitwise_and": ("{0} & {1}",
    "{0} &= {1}"),
    "__and__": ("{0} & {1}",), "__rand__": ("{1} & {0}",), "bitwise_or": ("{0} | {1}",
    "{0} |= {1}"),
    "__or__": ("{0} | {1}",), "__ror__": ("{1} | {0}",), "bitwise_xor": ("{0} ^ {1}",
    "{0} ^= {1}"),
    "__xor__": ("{0} ^ {1}",), "__rxor__": ("{1} ^ {0}",), "__lshift__": ("{0} << {1}",),
    "__rshift__": ("{0} >> {1}",), "bitwise_left_shift": ("{0} << {1}",),
    "bitwise_right_shift": ("{0} >> {1}",), "T": ("{0}.T",), "mT": ("{0}.mT",),
    "H": ("{0}.H",), "mH": ("{0}.mH",), "real": ("{0}.real",), "imag": ("{0}.imag",),
    "data": ("{0}.data",), "float": ("{0}.float()",),
}  # fmt: skip

_SELF = FormSlot("self", "tensor", True)
_OTHER = FormSlot("other", "number", True)
_OTHER_TENSOR = FormSlot("other", "tensor", True)


def _operators(op: str) -> list[FormSignature]:
    found: list[FormSignature] = []
    patterns = _OPERATORS.get(op, ())
    if op.startswith("__"):
        # Python tries the reversed method last, so an operator rarely reaches it.
        given = "{1}" if any("{1}" in pattern for pattern in patterns) else ""
        patterns = (*patterns, f"{{0}}.{op}({given})")
    for pattern in patterns:
        writes = "self" if "= {1}" in pattern and pattern[4] not in "=!<>" else ""
        seconds = [_OTHER_TENSOR] if "matmul" in op else [_OTHER, _OTHER_TENSOR]
        if "{1}" not in pattern:
            found.append(FormSignature(op, pattern, "", (_SELF,), pattern, writes))
            continue
        found += [
            FormSignature(op, pattern, "", (_SELF, second), pattern, writes)
            for second in seconds
        ]
    return found


@cache
def signatures(op: str) -> tuple[FormSignature, ...]:
    """Return all ways to call an op that torch offers, the same order each time."""
    if op in ("__getitem__", "__setitem__"):
        pattern = "{0}[{1}]" if op == "__getitem__" else "{0}[{1}] = {2}"
        slots = (_SELF, FormSlot("subscript", "subscript", True))
        if op == "__setitem__":
            slots = (*slots, FormSlot("value", "stored", True))
        writes = "self" if op == "__setitem__" else ""
        return (FormSignature(op, "subscript", "", slots, pattern, writes),)
    if op == "einsum":
        return (
            FormSignature(
                op, "einsum", "torch.einsum", (FormSlot("equation", "equation", True),)
            ),
        )
    every = [*_operators(op), *_from_schemas(op), *_from_python(op)]
    # A generator of one's own that must be given is not drawn.
    unknown = [s for s in every if any(x.kind == "never" and x.required for x in s.slots)]
    return tuple(dict.fromkeys(s for s in every if s not in unknown))
