"""Random numbers of ranks that are pieces of the numbers of one device.

Dropout on a rank drops what the rank's own generator says, so its results cannot be
compared with one device as they come. Here one device keeps what it draws, and a rank gets
its rows of that: the piece along the one dim in which the rank's draw is smaller. A draw of
the same shape is taken whole. Any other draw is the rank's own; a result that depends on it
is nobody's piece, and shows as false if a type calls it one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# The ops of torch that draw, by the name of their packet.
DRAWS = frozenset({
    "bernoulli", "bernoulli_", "uniform", "uniform_", "normal", "normal_", "normal_functional",
    "rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "randperm",
    "random_", "exponential_", "geometric_", "cauchy_", "log_normal_", "multinomial", "poisson",
    "native_dropout",
})  # fmt: skip

# Memory that nobody wrote holds anything; zeros can be compared.
ALLOCATES = frozenset({
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
})  # fmt: skip

Drawn = dict[tuple[Any, int], Tensor]


class Draws(TorchDispatchMode):
    """Keeps the draws of one device, or gives a rank its part of them."""

    def __init__(self, kept: Drawn, rank: int | None, ranks: int) -> None:
        super().__init__()
        self._kept, self._rank, self._ranks = kept, rank, ranks
        self.step: Any = None  # in which the draws come
        self._count = 0

    def begin(self, step: Any) -> None:
        self.step, self._count = step, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ALLOCATES:
            return result.zero_()
        if func.overloadpacket.__name__ not in DRAWS:
            if torch.Tag.nondeterministic_seeded in func.tags:
                _check_no_dropout(func, args, kwargs or {})
            return result
        assert isinstance(result, Tensor), f"{func} draws several tensors"
        key = (self.step, self._count)
        self._count += 1
        if self._rank is None:
            self._kept[key] = result.clone()
        elif key in self._kept:
            part = _part(self._kept[key], result, self._rank, self._ranks)
            if part is not None:
                result.copy_(part)
        return result


def _check_no_dropout(func: Any, args: Any, kwargs: Any) -> None:
    """Fused attention has a draw inside, which nobody could replace."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    assert not given.get("dropout_p"), f"{func} draws where this file cannot see it"


def _part(whole: Tensor, own: Tensor, rank: int, ranks: int) -> Tensor | None:
    if whole.shape == own.shape:
        return whole
    if whole.dim() != own.dim():
        return None
    cut = [d for d in range(own.dim()) if whole.shape[d] != own.shape[d]]
    if len(cut) != 1 or whole.shape[cut[0]] != ranks * own.shape[cut[0]]:
        return None
    return whole.chunk(ranks, cut[0])[rank]
