"""What tests of compiled code use: one graph or an error, and how often it was traced."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters

F = TypeVar("F", bound=Callable[..., Any])


def whole(function: F, backend: str = "aot_eager", **options: Any) -> F:
    """The function compiled as one graph: a break of the graph is an error."""
    # Simulated ranks are threads of one process, and each needs a graph of its own. A
    # thread has its own settings of torch.compile.
    torch._dynamo.config.recompile_limit = 64
    compiled: Any = torch.compile(function, fullgraph=True, backend=backend, **options)
    return compiled


@contextmanager
def traced() -> Iterator[list[int]]:
    """How many graphs are made inside, in a list that is filled at the end."""
    before, found = counters["stats"]["unique_graphs"], list[int]()
    yield found
    found.append(counters["stats"]["unique_graphs"] - before)


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Whether all are equal to the bit."""
    pairs = zip(found, wanted, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
