"""Tensors seen by inference and in messages: their operand, and their printed form."""

from torch import Tensor

from placements.inference.terms import Operand
from placements.runtime import tags
from placements.runtime.callsite import caller, name_of
from placements.runtime.errors import PlacementError, mismatch
from placements.runtime.mesh import checked_mesh
from placements.types.padding import print_pads
from placements.types.tensor import TensorType
from placements.types.text import Described

_SHORT = {
    "float": "f", "bfloat": "bf", "complex": "c", "int": "i", "uint": "u",
}  # fmt: skip


def short_dtype(dtype: str) -> str:
    letters = dtype.rstrip("0123456789")
    return _SHORT.get(letters, letters) + dtype[len(letters) :]


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def printed(shape: tuple[int, ...], dtype: str, tensor_type: TensorType | None) -> str:
    """`f32[6, 8]{dp:S(0), tp:P}`."""
    if tensor_type is None:
        return f"{short_dtype(dtype)}[{', '.join(map(str, shape))}] untyped"
    names = (None,) * len(shape)
    text = str(Described(short_dtype(dtype), shape, names, tensor_type))
    text += print_pads(tensor_type.pads)
    return text if tensor_type.index is None else f"{text} {tensor_type.index!r}"


def described(tensor: Tensor, tensor_type: TensorType | None = None) -> str:
    """`h f32[6, 8]{dp:S(0), tp:P}`: name, dtype, shape and type of a tensor."""
    known = tensor_type if tensor_type is not None else tags.get(tensor)
    text = printed(tuple(tensor.shape), dtype_name(tensor), known)
    name = name_of(tensor)
    return f"{name} {text}" if name else text


def operand_of(tensor: Tensor, where: str, position: int = 0) -> Operand:
    """The operand of a typed tensor; PlacementError if it has no type."""
    return Operand(
        type_or_error(tensor, where), tuple(tensor.shape), dtype_name(tensor), position
    )


def type_or_error(tensor: Tensor, where: str) -> TensorType:
    found = tags.get(tensor)
    if found is None:
        mesh = checked_mesh()
        if not mesh.axes:
            return TensorType(mesh, ())
        raise untyped(tensor, where)
    if tags.is_overwritten(tensor):
        name = name_of(tensor) or "the tensor"
        raise PlacementError(
            f"{where} at {caller()}: {name} was filled by a factory and then written "
            f"through another name for its memory, so its type is not known",
            where=where,
            name=name,
            rule="a write through a view does not tell the tensor below it",
            operands=[described(tensor)],
            advice="write through the tensor itself, not through a view of it",
        )
    return found


def untyped(tensor: Tensor, where: str) -> PlacementError:
    name = name_of(tensor) or "the tensor"
    axes = ", ".join(f"{axis!r}: ..." for axis in checked_mesh().axes)
    return PlacementError(
        f"{where} at {caller()}: {name} has no placement",
        where=where,
        name=name,
        rule="every tensor says what it is on each mesh axis",
        operands=[described(tensor)],
        advice=f"{name} = assert_type({name}, {{{axes}}})",
    )


def padded_at(
    where: str,
    x: Tensor,
    known: TensorType,
    rule: str = "rows of padding would be taken for others",
) -> PlacementError:
    """The error for a place that takes no rows of padding."""
    return mismatch(
        f"{where} at {caller()}", name_of(x) or "x", None, "no rows of padding",
        print_pads(known.pads).removeprefix(", "),
        rule=rule,
        operands=[described(x, known)],
        advice="leave them out: x[valid], or x[:n] after pad_rows",
    )  # fmt: skip
