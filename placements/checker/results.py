"""Results that are refused: sums of bools, and what `out=` cannot hold."""

from typing import Any

import torch
from torch import Tensor

from placements.checker.call import Call
from placements.runtime.errors import refused_call, type_or_error
from placements.types.tensor import TensorType


def refuse_bools(where: str, tensor: Tensor, known: TensorType) -> None:
    """Raise PlacementError for a Partial of bools: the sum of two is no bool."""
    if tensor.dtype is not torch.bool:
        return
    for axis, t in known.items():
        if t.letter == "P":
            raise refused_call(
                where,
                f"the result is bool and Partial on axis {axis!r}",
                axis=axis,
                rule="a bool does not count how many ranks said yes, so a sum over ranks must "
                "have another dtype",
                advice="sum whole numbers (dtype=torch.int64), all_reduce, then compare",
            )


def into(
    mode: Any, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """`op(..., out=x)` is `x.copy_(op(...))`, if x fits and nobody wants a gradient."""
    if call.takes_mesh or "reduction" in call.roles:
        raise refused_call(
            call.op.name, "out= of a factory or of a loss is not known",
            rule="a factory would change a tensor behind its type, and torch computes "
            "some losses otherwise with out=",
            advice="use the result",
        )  # fmt: skip
    out, rest = kwargs["out"], {k: v for k, v in kwargs.items() if k != "out"}
    try:
        result = mode.__torch_function__(func, (), args, rest)
    except RuntimeError as error:
        raise refused_call(
            call.op.name, f"it cannot be computed without out=: {error}"
        ) from error
    fits = isinstance(out, Tensor) and isinstance(result, Tensor)
    if fits and out.shape != result.shape:
        sizes = f"out= is {tuple(out.shape)}, the result is {tuple(result.shape)}"
        raise refused_call(
            call.op.name, f"torch does not take these pieces: {sizes}",
            rule="torch would give out= other memory behind its type",
            advice="use the result",
        )  # fmt: skip
    fits = fits and out.dtype == result.dtype
    # One row may be a piece or the whole.
    fits = fits and type_or_error(out, "out=").is_cut_as(type_or_error(result, "out="))
    if not fits or result.requires_grad or out.requires_grad:
        raise refused_call(
            call.op.name,
            "out= is not cut as the result, of another dtype, or wants a gradient",
            rule="torch would give it other memory, or cut the graph, behind its type",
            advice="use the result",
        )
    return mode.__torch_function__(Tensor.copy_, (), (out, result))
