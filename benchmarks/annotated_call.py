"""`@typed` with checking off: a call costs at most 0.5 us more than the bare one."""

from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.timing import Result, paired_difference
from placements import On, typed

LIMIT_US = 0.5


def bare(x_TD: Tensor, y_TD: Tensor) -> Tensor:
    return x_TD


@typed
def annotated(
    x_TD: Annotated[Float[Tensor, "T D"], On(dp="d", tp="t")],
    y_TD: Annotated[Float[Tensor, "T D"], On(dp="d", tp="t")],
) -> Annotated[Float[Tensor, "T D"], On(dp="d", tp="t")]:
    return x_TD


def measure() -> list[Result]:
    x = torch.randn(2, 3)
    over = paired_difference(lambda: bare(x, x), lambda: annotated(x, x), calls=20_000)
    shown = f"{over * 1e6:.2f} us per call"
    return [
        Result("@typed with checking off, over the bare call", shown, "<= 0.5 us", over * 1e6 <= LIMIT_US)
    ]
