"""`@typed` with checking off: a call costs at most 0.5 us more than the bare one."""

from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.timing import Candidate, Result, medians
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
    times = medians(
        {
            "bare": Candidate(lambda: bare(x, x)),
            "annotated": Candidate(lambda: annotated(x, x)),
        },
        calls=20_000,
    )
    over = (times["annotated"] - times["bare"]) * 1e6
    what = "@typed with checking off, over the bare call"
    return [Result(what, f"{over:.2f} us", f"<= {LIMIT_US} us", over <= LIMIT_US)]
