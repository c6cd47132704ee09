"""What a block may change, and a look at whether something of it was left behind."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch._dynamo  # whose stance a block replaces, too
import torch.distributed.fsdp  # whose groups it looks at
import torch.nn.attention.flex_attention  # whose makers of masks it replaces
from torch import Tensor

from placements import (
    PlacementError,
    S,
    _torch,
    assert_type,
    current_mesh,
    ledger,
    own_generator,
    set_current_mesh,
    set_gradient_dtype,
    shared_generator,
    type_of,
    typecheck,
    verify,
)
from placements.checker import patches
from placements.collectives.precision import gradient_dtype
from placements.runtime.ledger import active_ledger
from placements.runtime.state import block_here, checkers, current, suspended
from placements.types.mesh import as_mesh


class Undeclared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)  # memory that a kernel could fill

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class Interrupted(BaseException):
    pass


TWO_RANKS = as_mesh({"tp": 2})
_torch.watch_groups()  # it lasts, and begins with the first DeviceMesh


def snapshot() -> dict[Any, Any]:
    """What a block changes: every attribute that it replaces, and the state."""
    entries: dict[Any, Any] = {}
    for owner, name, _ in patches._patches():
        of_owner = owner if isinstance(owner, dict) else vars(owner)
        entries[id(owner), name] = of_owner.get(name)
    state = {
        "open": checkers.count,
        "block": block_here.get(),
        "shared": current.shared_axes,
        "mesh": current_mesh() if current_mesh() != TWO_RANKS else None,
        "ledger": active_ledger(),
        "policy": gradient_dtype("tp"),
    }
    return entries | state | dict(enumerate(_torch.modes()))


BEFORE = snapshot()


def changes(before: dict[Any, Any]) -> list[Any]:
    now = snapshot()
    return [key for key in before | now if before.get(key, now) is not now.get(key, before)]


def assert_clean() -> None:
    assert changes(BEFORE) == []


def assert_next_block_works() -> None:
    with typecheck():
        x = assert_type(torch.ones(2), {"tp": S(0)})
        assert type_of(x * 2) == {"tp": S(0)}
        with pytest.raises(PlacementError, match=r"Undeclared\.apply"):
            Undeclared.apply(x)
    assert_clean()


BLOCKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "typecheck": typecheck,
    "verify": verify,
    "ledger": ledger,
    "suspended": suspended,
    "shared_generator": lambda: shared_generator("tp"),
    "own_generator": lambda: own_generator("tp"),
}

# These hold as soon as they are made, with or without `with`.
AT_ONCE: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "set_current_mesh": lambda: set_current_mesh({"tp": 4}),
    "set_gradient_dtype": lambda: set_gradient_dtype(torch.bfloat16),
}


def checked_steps() -> Generator[bool]:
    with typecheck():
        while True:
            x = assert_type(torch.ones(2), {"tp": S(0)})
            yield type_of(x * 2) == {"tp": S(0)}


@pytest.fixture(autouse=True)
def on_two_ranks() -> Generator[None]:
    """Run each test of a file that imports this on two ranks; it must leave nothing behind."""
    with set_current_mesh({"tp": 2}):
        yield
    assert_clean()
