"""Numbers about the memory of a tensor: they belong to the axes that its sizes belong to.

`x.nbytes`, `x.stride()`, `x.storage_offset()`, `x.untyped_storage().nbytes()` and
`x.untyped_storage().size()`.
"""

import inspect
from typing import Any, cast

from placements.checker.numbers import letters_of_sizes
from placements.inference.numbers import Facts, belonging
from placements.runtime import tags
from placements.runtime.callsite import is_library
from placements.runtime.state import current
from placements.types.axis import Shard
from placements.types.tensor import TensorType


def bytes_of(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """x.nbytes: this rank's summand of the bytes of the whole, as x.numel() is."""
    result = func(*args, **kwargs)
    known = tags.get(args[0])
    if known is None:
        return result
    cut = tuple(axis for axis, t in known.items() if isinstance(t, Shard))
    return belonging(
        result, Facts(letters_of_sizes(known, cut), "nbytes", bool(known.pads))
    )


def layout_of(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """x.stride(), x.storage_offset(): products of sizes, so they differ where sizes do."""
    result = func(*args, **kwargs)
    known = tags.get(args[0])
    if known is None:
        return result
    if isinstance(result, tuple):
        strides = enumerate(cast(tuple[int, ...], result))
        return tuple(_step(known, d, n, f"stride()[{d}]") for d, n in strides)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dim is None:
        return _step(known, None, result, "storage_offset()")
    return _step(known, dim % args[0].dim(), result, f"stride({dim})")


def _step(known: TensorType, dim: int | None, steps: int, origin: str) -> int:
    """Return a distance in memory; between rows it does not depend on their number."""
    own = tuple(
        (axis, "V")
        for axis, t in known.items()
        if t.letter == "V" or (isinstance(t, Shard) and t.dim != dim)
    )
    return belonging(steps, Facts(own, origin))


def memory_with_type(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """x.untyped_storage(): its size differs by rank where the size of the tensor does."""
    memory, known = func(*args, **kwargs), tags.get(args[0])
    if known is not None:
        own = tuple((a, "V") for a, t in known.items() if t.letter in "SV")
        tags.put_axes(memory, own)
        tags.note_name(args[0])  # whoever has the memory can make another name for it
    return memory


def bytes_of_memory(name: str, count: Any) -> Any:
    """`UntypedStorage.nbytes` or `.size`, whose result belongs to the tensor's axes."""

    def bytes_of_memory(self: Any) -> int:
        result, asking = count(self), inspect.currentframe()
        own = tags.axes_of(self) if current.mode is not None else ()
        # Torch asks when it saves a tensor: a file holds plain numbers.
        if asking and asking.f_back and is_library(asking.f_back.f_code.co_filename):
            return result
        return belonging(result, Facts(own, f"untyped_storage().{name}()"))

    return bytes_of_memory
