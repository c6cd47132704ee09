"""The names of ops, and their signatures as torch publishes them."""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import inspect
from types import FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch

from placements._torch.supported import inside

# A slot of a signature: its name, its kind, its default (`NO_DEFAULT`: it must be given),
# and whether it is given by name only. The kinds are words of torch's schemas ("Tensor",
# "Scalar", "int", "int[]", "bool", "dtype", ...); "any" where torch does not say.
SlotData = tuple[str, str, Any, bool]
NO_DEFAULT: Any = object()
REST = "rest"  # the kind of a slot that takes all positional arguments that are left


def op_name(func: object) -> str | None:
    """`aten::mm` of an operator; None of any other function."""
    if isinstance(func, torch._ops.OpOverload):
        func = func.overloadpacket
    if isinstance(func, torch._ops.OpOverloadPacket):
        return str(func._qualified_op_name)
    return None


def signatures(func: Any, name: str) -> tuple[bool, list[list[SlotData]]]:
    """Return whether a torch function is a method in C, and all its overloads.

    A function written in Python has its own signature. A function in C has the schemas of
    the op of that name, and if there are none, the signature that torch's own tests of
    overriding use.
    """
    if isinstance(func, torch._ops.OpOverload):
        return False, [_slots(func._schema)]
    is_method = isinstance(func, _METHODS)
    plain = inspect.unwrap(func) if isinstance(func, FunctionType) else func
    if isinstance(plain, FunctionType) and plain in _BY_FLAG:
        plain = _BY_FLAG[plain]["if_true"]  # F.max_pool2d stands for two functions
    if isinstance(plain, FunctionType):
        return False, [_python_slots(plain)]
    schemas = schemas_of(name) or schemas_of(name.removesuffix("_"))
    overloads = [_slots(schema) for schema in schemas if _is_called(schema)]
    overloads += _PARSED.get(name, [])
    if overloads:
        return is_method or isinstance(plain, _METHODS), overloads
    dummy = torch.overrides.get_testing_overrides().get(func)
    return False, [] if dummy is None else [_python_slots(dummy)]


_METHODS = (MethodDescriptorType, WrapperDescriptorType)
# Functions that stand for one of two, by a flag among their arguments.
_BY_FLAG: Any = getattr(inside("torch._jit_internal"), "boolean_dispatched", {})

# What Python's own parser takes beside the schemas: x.to("cpu"), x.nonzero(as_tuple=True).
_PARSED: dict[str, list[list[SlotData]]] = {
    "to": [
        [("self", "Tensor", NO_DEFAULT, False), ("device", "device?", None, False),
         ("dtype", "dtype?", None, False), ("non_blocking", "bool", False, False),
         ("copy", "bool", False, False), ("memory_format", "memory_format?", None, True)],
    ],
    "nonzero": [
        [("self", "Tensor", NO_DEFAULT, False), ("as_tuple", "bool", NO_DEFAULT, True)],
    ],
}  # fmt: skip


def schemas_of(name: str) -> list[Any]:
    """Return the schemas of all overloads of an operator; none if there is no operator.

    `name` is "sum", which stands for "aten::sum", or qualified: "my_ops::swish".
    """
    qualified = name if "::" in name else f"aten::{name}"
    return torch._C._jit_get_schemas_for_operator(qualified)


def _is_called(schema: Any) -> bool:
    """Return whether Python may call an overload: others are for `out=` and TorchScript."""
    arguments = schema.arguments
    if any(a.is_out or str(a.real_type).startswith("Dimname") for a in arguments):
        return False
    result = [str(r.real_type) for r in schema.returns]
    return schema.overload_name not in _SCRIPTED and any("Tensor" in r for r in result)


_SCRIPTED = ("t", "hacked_twin", "prim_Device", "prim_dtype", "prim_other", "a")


def _slots(schema: Any) -> list[SlotData]:
    return [
        (
            a.name,
            kind_of(a),
            a.default_value if a.has_default_value() else NO_DEFAULT,
            a.kwarg_only,
        )
        for a in schema.arguments
    ]


def element_slots(name: str, plain: str) -> list[list[SlotData]]:
    """Return the overloads of an op over lists, as one element of the lists meets them.

    `Tensor[] tensors1` of `_foreach_lerp` is `Tensor end`, as `plain`, the op for one
    element, calls what stands in its place.
    """
    of_plain = [[a.name for a in s.arguments] for s in schemas_of(plain) if _is_called(s)]
    known = {own_name for names in of_plain for own_name in names}
    longest: list[str] = max(of_plain, key=len) if of_plain else []
    return [
        [
            (
                own_name if own_name in known or k >= len(longest) else longest[k],
                kind.replace("[]", ""),
                default,
                by_name,
            )
            for k, (own_name, kind, default, by_name) in enumerate(_slots(schema))
        ]
        for schema in schemas_of(name)
        if not any(a.is_out or _is_list_in_a_tensor(a) for a in schema.arguments)
    ]


def _is_list_in_a_tensor(argument: Any) -> bool:
    """Return whether it is one tensor with a number for each element of the lists."""
    return argument.name == "scalars" and str(argument.real_type) == "Tensor"


_KINDS = {"SymInt": "int", "ScalarType": "dtype", "Device": "device", "Layout": "layout",
          "MemoryFormat": "memory_format", "number": "Scalar"}  # fmt: skip


def kind_of(argument: Any) -> str:
    """Return the kind of a slot, from the type in its schema: `SymInt[1]?` -> `int[]?`."""
    text = str(argument.real_type)
    optional = "?" if text.endswith("?") or text.startswith("Optional[") else ""
    plain = text.removesuffix("?").removeprefix("Optional[")
    if optional and not text.endswith("?"):
        plain = plain.removesuffix("]")
    element, bracket, _ = plain.partition("[")
    if element == "List":
        element = plain[5:-1]
    element = element.partition("(")[0].removesuffix("?")
    if "Tensor" in element:
        element = "Tensor"
    return _KINDS.get(element, element) + ("[]" if bracket else "") + optional


def _python_slots(function: Any) -> list[SlotData]:
    slots: list[SlotData] = []
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.VAR_KEYWORD:
            continue
        kind = REST if p.kind is p.VAR_POSITIONAL else "any"
        default = NO_DEFAULT if p.default is p.empty else p.default
        slots.append((p.name, kind, default, p.kind is p.KEYWORD_ONLY))
    return slots
