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


@dataclass(frozen=True)
class Slot:
    """One argument of a signature; `kind` says what is drawn for it."""

    name: str
    kind: str
    required: bool
    keyword_only: bool = False


@dataclass(frozen=True)
class Signature:
    """One way to call an op.

    `head` is what stands before the arguments: `torch.sum`, or `.sum` of a method. An
    operator has a `pattern` instead, such as `{0} + {1}`. `writes` is the slot whose
    tensor the call writes to.
    """

    op: str
    overload: str
    head: str
    slots: tuple[Slot, ...]
    pattern: str = ""
    writes: str = ""

    def __str__(self) -> str:
        names = ", ".join(slot.name for slot in self.slots)
        return f"{self.pattern or self.head}({names})"


# Arguments of the interpreter's own overloads (of numbers, strings, lists), which share
# names with ops of tensors.
_OF_SCRIPTS = {"a", "b", "l", "list", "s", "key"}
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
    "size_average",
    "reduce", "_stacklevel", "sparse", "scale_grad_by_freq", "max_norm", "names",
    "requires_grad",
    "path", "cudnn_enable", "implicit", "process_group", "async", "input_scale",
}  # fmt: skip
_DIMS = {
    "dim", "dims", "axis", "dim0", "dim1", "axis0", "axis1", "start_dim", "end_dim",
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
    if name in _NEVER_GIVEN and (name, torch_type) != ("reduce", "str"):
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
    if plain & _OF_SCRIPTS or any(bad in t for t in types for bad in _OF_OTHERS):
        return False
    if "names" in names or any("Dimname" in t for t in types):
        return False
    return any("Tensor" in t for t in types) or bool(names & {"size", "end", "n"})


def _slots_of(schema: Any, op: str) -> tuple[Slot, ...]:
    return tuple(
        Slot(
            str(a.name),
            _kind(str(a.name), str(a.type), op),
            not a.has_default_value(),
            bool(a.kwarg_only),
        )
        for a in schema.arguments
    )


def _heads(name: str, slots: tuple[Slot, ...]) -> list[str]:
    """Where torch has a function or method of that name that takes a schema's arguments."""
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
    for family, module in (("special", torch.special), ("linalg", torch.linalg)):
        short = name.removeprefix(f"{family}_")
        if short != name and hasattr(module, short):
            heads.append(f"torch.{family}.{short}")
    return heads


def _from_schemas(op: str) -> list[Signature]:
    found: list[Signature] = []
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
            if any(s.kind == "tensor" for s in outputs):
                continue  # several out= tensors, spelled as a tuple: not drawn
            heads = _heads(name, slots)
            if writes == "out":
                heads = [h for h in heads if not h.startswith(".")]
            found += [Signature(op, overload, head, slots, writes=writes) for head in heads]
    return found


_ANNOTATED = {
    "Tensor": "Tensor", "Optional[torch.Tensor]": "Tensor", "int": "int", "float": "float",
    "bool": "bool", "str": "str", "List[int]": "List[int]",
}  # fmt: skip
_BY_NAME = {
    "tensor": "Tensor", "input": "Tensor", "self": "Tensor", "other": "Tensor",
    "weight": "Tensor",
    "target": "Tensor", "bias": "Tensor", "mat_a": "Tensor", "mat_b": "Tensor",
    "offs": "Tensor",
    "pos_weight": "Tensor", "split_size": "int", "sizes": "List[int]", "dim": "int",
    "p": "number",
    "dims": "List[int]", "keepdim": "bool", "pad": "List[int]",
    "split_size_or_sections": "int",
    "eps": "float", "value": "float", "mode": "str", "reduction": "str",
    "descending": "bool",
    "k": "int", "shape": "List[int]", "ord": "number", "alpha": "float", "beta": "float",
    "inplace": "bool", "training": "bool", "a": "float", "b": "float", "mean": "float",
    "std": "float", "gain": "float", "nonlinearity": "str", "normalized_shape": "List[int]",
    "threshold": "float", "label_smoothing": "float", "ignore_index": "int",
    "delta": "float",
    "stable": "bool", "negative_slope": "float", "min_val": "float", "max_val": "float",
    "padding_idx": "int",
}  # fmt: skip


def _python_slots(signature: inspect.Signature, op: str) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    for p in signature.parameters.values():
        if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            continue
        torch_type = _BY_NAME.get(p.name, "")
        kind = _kind(p.name, torch_type, op)
        if op in ("cross_entropy", "nll_loss") and p.name == "target":
            kind = "index"
        if op == "embedding" and p.name == "input":
            kind = "index"
        required = p.default is p.empty
        slots.append(Slot(p.name, kind, required, p.kind is p.KEYWORD_ONLY))
    return tuple(slots)


def _from_python(op: str) -> list[Signature]:
    """Functions written in Python, and methods that only `torch.overrides` knows."""
    found: list[Signature] = []
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
                given = inspect.signature(function)
            elif home == "" and function in stand_ins and not schemas_of(name):
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
                Signature(op, f"{home}.{name}", f"{home}.{name}", slots, writes=writes)
            )
    return found


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
    "data": ("{0}.data",), "float": ("{0}.float()",),
}  # fmt: skip

_SELF = Slot("self", "tensor", True)
_OTHER = Slot("other", "number", True)
_OTHER_TENSOR = Slot("other", "tensor", True)


def _operators(op: str) -> list[Signature]:
    found: list[Signature] = []
    for pattern in _OPERATORS.get(op, ()):
        writes = "self" if "= {1}" in pattern and pattern[4] not in "=!<>" else ""
        seconds = [_OTHER_TENSOR] if "@" in pattern else [_OTHER, _OTHER_TENSOR]
        if "{1}" not in pattern:
            found.append(Signature(op, pattern, "", (_SELF,), pattern, writes))
            continue
        found += [
            Signature(op, pattern, "", (_SELF, second), pattern, writes)
            for second in seconds
        ]
    return found


@cache
def signatures(op: str) -> tuple[Signature, ...]:
    """All ways to call an op that torch offers, the same order each time."""
    if op in ("__getitem__", "__setitem__"):
        pattern = "{0}[{1}]" if op == "__getitem__" else "{0}[{1}] = {2}"
        slots = (_SELF, Slot("subscript", "subscript", True))
        if op == "__setitem__":
            slots = (*slots, Slot("value", "stored", True))
        writes = "self" if op == "__setitem__" else ""
        return (Signature(op, "subscript", "", slots, pattern, writes),)
    if op == "einsum":
        return (
            Signature(op, "einsum", "torch.einsum", (Slot("equation", "equation", True),)),
        )
    every = [*_operators(op), *_from_schemas(op), *_from_python(op)]
    # A generator of one's own that must be given is not drawn.
    unknown = [s for s in every if any(x.kind == "never" and x.required for x in s.slots)]
    return tuple(dict.fromkeys(s for s in every if s not in unknown))
