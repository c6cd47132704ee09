"""What to do with each torch function that the mode sees, found once by its name.

An op of the table; a function that is made of such ops; a question that reveals no value;
a value read as a number; an entrance to backward; or something that is not known, and
refused.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from placements._torch import in_transform, op_name, signatures
from placements.checker.backward import AUTOGRAD, gradient_of, set_gradient
from placements.checker.call import Call
from placements.checker.composed import flex_attention, looked_into
from placements.checker.guards import raw_collective
from placements.checker.hooks import register_hook
from placements.checker.layout import bytes_of, layout_of, memory_with_type
from placements.checker.numbers import length_of, numbers_read, shape_of
from placements.checker.training.lists import Element, fused_step, list_op
from placements.checker.writes import check_data, lend_memory_of, reading_only
from placements.inference.fixes import call_text
from placements.inference.literals import literal_type
from placements.inference.op import Op
from placements.inference.ops import COMPOSED, LITERALS, METADATA, OPS, READS, SOURCES
from placements.inference.signature import ANY
from placements.runtime import tags
from placements.runtime.callsite import located, name_of
from placements.runtime.describe import described
from placements.runtime.errors import (
    mismatch,
    padded_at,
    refused_call,
    transformed,
    type_or_error,
)
from placements.runtime.mesh import checked_mesh
from placements.types.axis import P, R
from placements.types.tensor import LEAF, MADE

# torch function -> a Call, or what handles it: handler(mode, func, args, kwargs)
KNOWN: dict[Any, Any] = {}


def resolve(func: Any) -> Any:
    """Find out once what to do with a torch function, and remember it."""
    known = _find(func)
    KNOWN[func] = known
    return known


def _find(func: Any) -> Any:
    name = torch_name(func)
    if name == "grad" and getattr(func, "__name__", "") == "__get__":
        return gradient_of
    if name in _HANDLERS:
        return _HANDLERS[name]
    if name in METADATA or name in SOURCES or name.endswith(".__set__"):
        return passed
    if name in READS:
        return _read
    if str(getattr(func, "__module__", "")).startswith("torch.distributed"):
        return _unknown  # torch.distributed.gather and scatter are no ops on one tensor
    is_python = isinstance(func, FunctionType)
    if is_python and (name in COMPOSED or func.__module__ == nn.init.__name__):
        return looked_into
    if name in OPS:
        call = _call_of(func, name, OPS[name], in_place=OPS[name].writes)
        return call if "::" not in name else _custom(func, name, call)
    base = name[:-1] if name.endswith("_") and not name.endswith("__") else ""
    if name.startswith("__i") and name.endswith("__"):
        base = f"__{name[3:]}"  # x &= y
    if base in OPS:
        return _call_of(func, name, OPS[base], in_place=True)
    listed = list_op(name) or fused_step(name)
    if listed is None:
        return _unknown
    KNOWN[Element(name)], handler = listed
    return handler


def _call_of(func: Any, name: str, op: Op, in_place: bool) -> Call:
    """Return the op with the overloads of this function, as torch's schemas give them."""
    is_method, overloads = signatures(func, name)
    names = list(op.roles)
    if "::" in name and "*" not in op.roles:  # a custom op has names of its own
        overloads = [
            [(names[k] if k < len(names) else s[0], *s[1:]) for k, s in enumerate(slots)]
            for slots in overloads
        ]
    if not overloads:
        overloads = [[(slot, ANY, None, False) for slot in names]]
    return Call(op, in_place, overloads, is_method, converts=op_name(func) is not None)


def torch_name(func: Any) -> str:
    """Return the name by which the table knows an op."""
    qualified = op_name(func)
    if qualified is not None:
        return qualified.removeprefix("aten::")
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):
        owner = func.__self__.__name__
        return owner if name == "__get__" else f"{owner}.__set__"
    module = str(getattr(func, "__module__", None) or "torch")
    return name if module.partition(".")[0] == "torch" else f"{module}.{name}"


def _custom(func: Any, name: str, call: Call) -> Any:
    """Handle a custom op: its types are known, but it may not write its arguments."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        with reading_only(name, (*args, *kwargs.values())):
            return func(*args, **kwargs)

    def handle(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        return mode.__torch_function__(watched, (), args, kwargs)

    KNOWN[watched] = call
    return handle


def passed(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Answer a question that reveals no value; the mode does so without coming here."""
    return func(*args, **kwargs)


def _leaf(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """x.requires_grad_(): nobody said yet what its gradient is, so it is no constant."""
    result = func(*args, **kwargs)
    known = tags.get(args[0])
    if known is not None and known.fresh is not None and args[0].requires_grad:
        tags.put(args[0], known.with_fresh(LEAF))
    return result


def _literal(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """torch.tensor(2.0), torch.tensor([1, 2]): numbers that stand in the program."""
    result = func(*args, **kwargs)
    given = [arg for arg in (*args, *kwargs.values()) if not isinstance(arg, Tensor)]
    for arg in given:
        lend_memory_of(arg, result)
    if given and not result.requires_grad and not any(result is arg for arg in args):
        known = literal_type(checked_mesh(), given[0])
        if known is not None:
            tags.put(result, known)
    return result


def _memory(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """x.data: torch does not count writes through it, so they may not change a type."""
    result = func(*args, **kwargs)
    known = tags.get(args[0])
    if known is not None:
        known = type_or_error(args[0], "data")
        if known.is_number:
            tags.put(args[0], known.with_fresh(MADE))
        tags.put(result, known.written())
    return result


def _set_data(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """x.data = y: x becomes what y is, unless it was said to be something else."""
    check_data(args[0], args[1])
    result = func(*args, **kwargs)
    known = tags.get(args[1])
    if known is None:
        tags.clear(args[0])
    else:
        tags.put(args[0], known)
    return result


def _read(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Read a value as a Python number, unless it is pending a sum."""
    read = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    for tensor in read:
        known = tags.get(tensor)
        if known is not None and known.pads:
            raise padded_at(torch_name(func), tensor, known)
        for axis in known or ():
            if known is not None and known[axis].letter == "P":
                name = name_of(tensor, torch_name(func)) or "x"
                raise mismatch(
                    located(torch_name(func)), name, axis, "Replicate", "Partial",
                    rule="this rank holds one summand, not the value",
                    operands=[described(tensor)],
                    advice=call_text("all_reduce", name, axis, P, R),
                )  # fmt: skip
    _refuse_conversion(func, read)
    try:
        result = func(*args, **kwargs)
    except RuntimeError as error:
        raise refused_call(
            torch_name(func),
            f"torch does not take these pieces: {error}",
            operands=[described(t) for t in read],
        ) from error
    return numbers_read(read, result)


def _refuse_conversion(func: Any, args: Sequence[Tensor]) -> None:
    """int(x), float(x): Python makes a plain number, which would not say its axis."""
    known = tags.get(args[0]) if args else None
    conversion = _CONVERSIONS.get(torch_name(func))
    if known is None or conversion is None:
        return
    axis = next((axis for axis, t in known.items() if t.letter in "VS"), None)
    if axis is not None:
        name = name_of(args[0], conversion) or "x"
        raise refused_call(
            f"{conversion}({name})",
            f"{name} differs by rank on axis {axis!r}, and this makes a plain number of it",
            name=name,
            axis=axis,
            rule="a number that differs by rank must say so",
            operands=[described(args[0], known)],
            advice=f"{name}.item()",
        )


_CONVERSIONS = {"__int__": "int", "__float__": "float", "__complex__": "complex"}


def _array(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Make a read-only array of numpy over the memory of a tensor with a type."""
    array = _read(mode, func, args, kwargs)
    if tags.get(args[0]) is not None:
        array.flags.writeable = False
    return array


def _unknown(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    if mode.lenient:
        return func(*args, **kwargs)
    name = torch_name(func)
    module = str(getattr(func, "__module__", ""))
    namespaces = ("_c10d_functional", "c10d")
    if name.startswith(namespaces) or module.startswith("torch.distributed"):
        every = (*args, *kwargs.values())
        group = next((a for a in every if isinstance(a, dist.ProcessGroup)), None)
        raise raw_collective(name.rpartition("::")[2], group, every)
    if in_transform():
        raise transformed(name, "this op is not known", name)
    raise refused_call(
        name,
        "the table of ops does not know it",
        name=name,
        rule="an op that is not known could do anything to placements",
        operands=[described(t) for t in args if isinstance(t, Tensor)],
        advice=_advice(name),
    )


def _advice(name: str) -> str:
    """Say what to do about an op that the table lacks; `like=` for a known relative."""
    base = name.rpartition("::")[2].strip("_").removesuffix("_")
    relatives = [known for known in OPS if known.strip("_") == base]
    if relatives:
        return f"placements.register_op({name!r}, like={relatives[0]!r})"
    return (
        "wrap it in placements.region(fn, ins=..., outs=..., grads=...), which says what "
        "it takes and gives; or, if a known op treats its operands and dims alike, "
        f"placements.register_op({name!r}, like=<that op>)"
    )


def register_op(name: str, like: str) -> None:
    """Make an op known that treats its operands as a known one does.

    `name` is the torch name, or `namespace::name` of a custom op.
    """
    if like not in OPS:
        raise ValueError(f"like={like!r} is not in the table of ops")
    if name in OPS:
        raise ValueError(f"{name!r} is in the table of ops already")
    OPS[name] = replace(OPS[like], name=name)
    KNOWN.clear()


# What is neither an op nor a plain question or read.
_HANDLERS: dict[str, Any] = {
    **AUTOGRAD,
    **dict.fromkeys(LITERALS, _literal),
    "register_hook": register_hook,
    "grad.__set__": set_gradient,
    "data": _memory,
    "data.__set__": _set_data,
    "requires_grad_": _leaf,
    "requires_grad.__set__": _leaf,
    "real.__set__": _unknown,  # x.real = y writes a part of x
    "imag.__set__": _unknown,
    "shape": shape_of,
    "size": shape_of,
    "numel": shape_of,
    "nelement": shape_of,
    "flex_attention": flex_attention,
    "__len__": length_of,
    "stride": layout_of,
    "storage_offset": layout_of,
    "nbytes": bytes_of,
    "untyped_storage": memory_with_type,
    "numpy": _array,
    "__array__": _array,
}
