"""How a tensor is printed: its name, dtype, shape and type."""

from collections.abc import Sequence

from torch import Tensor

from placements.runtime import tags
from placements.runtime.callsite import name_of
from placements.types.axis import print_types
from placements.types.padding import print_pads
from placements.types.tensor import TensorType

_SHORT = {
    "float": "f", "bfloat": "bf", "complex": "c", "int": "i", "uint": "u",
}  # fmt: skip


def short_dtype(dtype: str) -> str:
    """`f32` for "float32"."""
    letters = dtype.rstrip("0123456789")
    return _SHORT.get(letters, letters) + dtype[len(letters) :]


def dtype_name(tensor: Tensor) -> str:
    """`float32`, without the name of the module."""
    return str(tensor.dtype).removeprefix("torch.")


def printed(
    shape: tuple[int, ...],
    dtype: str,
    tensor_type: TensorType | None,
    names: Sequence[str] = (),
) -> str:
    """`f32[6, 8]{dp:S(0), tp:P}`; with names of dims, `f32[T=6, D=8]{...}`."""
    sizes = [f"{n}={size}" for n, size in zip(names, shape, strict=False)]
    text = f"{short_dtype(dtype)}[{', '.join(sizes or map(str, shape))}]"
    if tensor_type is None:
        return f"{text} untyped"
    text += print_types(tensor_type)
    if tensor_type.pads:
        text += print_pads(tensor_type.pads)
    return text if tensor_type.index is None else f"{text} {tensor_type.index!r}"


def described(
    tensor: Tensor, tensor_type: TensorType | None = None, name: str | None = None
) -> str:
    """`h f32[6, 8]{dp:S(0), tp:P}`: name, dtype, shape and type of a tensor."""
    known = tensor_type if tensor_type is not None else tags.get(tensor)
    text = printed(tuple(tensor.shape), dtype_name(tensor), known)
    name = name or name_of(tensor)
    return f"{name} {text}" if name else text
