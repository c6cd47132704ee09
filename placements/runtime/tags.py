"""Put, read and clear the type of a tensor, and name every attribute of this package.

Only this file touches these attributes. A tensor holds its type and no type holds a
tensor, so nothing is kept alive. A tensor is pickled without its type, because the file
may be loaded without this package.
"""

from collections.abc import Mapping
from typing import cast

from torch import Tensor, nn

from placements._torch import leave_out_of_pickles, version_of
from placements.types.axis import TypesLike
from placements.types.tensor import TensorType

leave_out_of_pickles("_placements_")

_TYPE = "_placements_type"
_VERSION = "_placements_version"  # of a factory's tensor, when it got its type
_DECLARED = "_placements_declared"  # on a module: what `declare` said of its own tensors
# On tensors: what typed collectives did to a gradient, and that a sum has read its memory.
NOTE = "_placements_gradient"
READ = "_placements_read"
# On a module's class: the arrays in its annotations, whose dtypes are checked.
STATED = "_placements_stated"


def get(tensor: Tensor) -> TensorType | None:
    """The tensor's type; None if it has none."""
    return cast(TensorType | None, getattr(tensor, _TYPE, None))


def put(tensor: Tensor, tensor_type: TensorType) -> None:
    setattr(tensor, _TYPE, tensor_type)
    if tensor_type.fresh is not None:
        setattr(tensor, _VERSION, version_of(tensor))


def clear(tensor: Tensor) -> None:
    if get(tensor) is not None:
        delattr(tensor, _TYPE)


def forget_factory(tensor: Tensor) -> None:
    """Clear the type that a factory gave, after unchecked code wrote to the tensor.

    A declared type stays: whoever declared it answers for the values.
    """
    known = get(tensor)
    if known is not None and known.fresh is not None:
        clear(tensor)


def is_overwritten(tensor: Tensor) -> bool:
    """Whether a factory's tensor was written through another name for its memory."""
    known = get(tensor)
    if known is None or known.fresh is None:
        return False
    return getattr(tensor, _VERSION, None) != version_of(tensor)


def declarations(module: nn.Module) -> Mapping[str, TypesLike]:
    """What `declare` said of this module's own parameters and buffers."""
    return module.__dict__.get(_DECLARED, {})


def remember(module: nn.Module, name: str, types: TypesLike) -> None:
    """Keep a declaration with the module; the tensors get it when the module is called."""
    module.__dict__.setdefault(_DECLARED, {})[name] = dict(types)
