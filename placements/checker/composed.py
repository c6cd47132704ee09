"""Functions of torch in Python that are made of known ops: each part is judged."""

import inspect
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from placements._torch import body_of
from placements.checker.refusals import COMPLAINTS, refuse_pieces
from placements.inference.numbers import RANK_NUMBERS, plain
from placements.runtime.errors import refused_call

# What losses took before `reduction`; torch does not say that they are flags.
_OLD_FLAGS = ("size_average", "reduce")


class _Again(TorchFunctionMode):
    """The mode of a block, once more: torch leaves a mode while it handles a call."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.mode.__torch_function__(func, types, args, kwargs)


def _refuse_flags(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse a number that belongs to an axis as a flag: ranks would do other things."""
    for name, value in _bound(body_of(func), args, kwargs):
        if value.__class__ in RANK_NUMBERS:
            raise refused_call(
                func.__name__,
                f"{name}={value.facts.origin} is a flag, expected True or False",
                rule="a number that belongs to an axis may differ by rank, and then each "
                "rank would do something else",
                advice=f"{func.__name__} with the flag and without it, and torch.where",
            )


def _bound(body: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Yield the arguments in slots for flags; torch complains of others itself."""
    slots = _slots(body)
    given = dict(zip(slots, args, strict=False)) | kwargs
    for name, is_flag in slots.items():
        if is_flag and name in given:
            yield name, given[name]


@cache
def _slots(body: Any) -> dict[str, bool]:
    """Return the slots of a function, and which of them are flags."""
    slots = inspect.signature(body).parameters.items()
    return {
        name: name in _OLD_FLAGS or "bool" in f"{slot.annotation} {type(slot.default)}"
        for name, slot in slots
    }


def looked_into(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run the body of the function inside the mode."""
    _refuse_flags(func, args, kwargs)
    try:
        with _Again(mode):
            return body_of(func)(*args, **kwargs)
    except COMPLAINTS as error:
        refuse_pieces(error, func.__name__, (args, kwargs))
        raise


def flex_attention(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Compute attention whose scores a function of the program changes, op by op.

    The function is given the number of the row in every dim, and a rank counts from 0 in
    its own piece. Whether it may use a number depends on what it does with it: an index of
    own rows reads what is cut alike, and a comparison of positions of a cut sequence is
    each rank's own. So the numbers are tensors with types here, and the function is checked
    like other code.
    """
    with _Again(mode):
        return _attention(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: Any,
    score_tensors: tuple[Any, ...] = (),
    mask_tensors: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    exact = torch.float64 if query.dtype is torch.float64 else torch.float32
    key, value = (_for_all(query, x) for x in (key, value))
    scores = (query.to(exact) @ key.to(exact).transpose(-2, -1)) * scale
    places = [_numbers(scores, dim) for dim in range(4)]
    mask_mod = block_mask[-1]
    scores = torch.where(
        mask_mod(*places, *mask_tensors),
        score_mod(scores, *places, *score_tensors),
        -math.inf,
    )
    # A query that sees nothing has weights 0 and not nan.
    is_blind = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.where(is_blind, 0.0, torch.where(is_blind, 0.0, scores).softmax(-1))
    sums = torch.where(is_blind, 0.0, scores).logsumexp(-1)
    sums = torch.where(is_blind.squeeze(-1), -math.inf, sums)
    # The caller multiplies by log(2), because kernels compute in powers of 2.
    base = math.log(2)
    return (
        weights.to(query.dtype) @ value.to(query.dtype),
        sums / base,
        scores.amax(-1) / base,
    )


def _for_all(query: Tensor, x: Tensor) -> Tensor:
    """Repeat keys or values for the queries that share them: heads of a group, a batch."""
    heads = plain(query.shape[1]) // max(plain(x.shape[1]), 1)
    if heads > 1:
        x = x.unsqueeze(2).expand(-1, -1, heads, -1, -1).flatten(1, 2)
    if plain(x.shape[0]) == 1 and plain(query.shape[0]) > 1:
        x = x.expand(query.shape[0], -1, -1, -1)
    return x


def _numbers(scores: Tensor, dim: int) -> Tensor:
    """The numbers of the rows along a dim, in a shape that meets the scores."""
    sizes = [-1 if d == dim else 1 for d in range(4)]
    return torch.arange(scores.shape[dim], device=scores.device).view(sizes)
