"""A small model on {"dp": 2, "tp": 2}, trained on simulated ranks and on one device.

Batches are cut over dp; one layer is cut over tp, one bias is equal everywhere.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from placements import (
    I,
    P,
    R,
    S,
    all_reduce,
    assert_type,
    convert,
    declare,
    reduce_gradients,
    set_current_mesh,
    split,
    typecheck,
)
from placements.testing import device_mesh

AXES = {"dp": 2, "tp": 2}
TYPES: dict[str, Any] = {
    "up": {"dp": R, "tp": S(0)},
    "down": {"dp": R, "tp": S(1)},
    "bias": {"dp": R, "tp": R},
}
WHOLE: dict[str, Any] = {name: {"dp": R, "tp": R} for name in TYPES}  # nothing over tp
INPUT: dict[str, Any] = {"dp": S(0), "tp": R}
STEPS = 3

Make = Callable[[nn.Module], torch.optim.Optimizer]
Then = Callable[[nn.Module], object]


class Trained(NamedTuple):
    """Parameters by name, and the state of the optimizer for each of them."""

    parameters: dict[str, Tensor]
    state: dict[str, dict[str, Any]]


def _values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"up": (8, 4), "down": (4, 8), "bias": (4,), "x": (6, 4), "y": (6, 4)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


class Model(nn.Module):
    """y = tanh(x up') down' + bias; `sums` says whether the ranks of tp hold summands."""

    def __init__(self, values: dict[str, Tensor], sums: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(values["up"].clone())
        self.down = nn.Parameter(values["down"].clone())
        self.bias = nn.Parameter(values["bias"].clone())
        self.sums = sums

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.up.T) @ self.down.T
        if self.sums:
            y = all_reduce(y, "tp", src=P, dst=R)
        return y + self.bias


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
    named = dict(model.named_parameters())
    state = {name: dict(optimizer.state.get(p, {})) for name, p in named.items()}
    return Trained({name: p.detach().clone() for name, p in named.items()}, state)


def on_one_device(make: Make, then: Then = reduce_gradients) -> Trained:
    values = _values()
    model = Model(values, sums=False)
    optimizer = make(model)
    for _ in range(STEPS):
        model.zero_grad()
        ((model(values["x"]) - values["y"]) ** 2).sum().backward()
        if then is not reduce_gradients:
            then(model)
        optimizer.step()
    return _state(model, optimizer)


def on_a_rank(
    make: Make, then: Then = reduce_gradients, types: dict[str, Any] = TYPES
) -> Trained:
    """Train inside one block; `then` is what happens between backward and step."""
    mesh = device_mesh()
    said = {**types, "x": INPUT, "y": INPUT}
    rank = mesh.get_rank()
    mine = {name: split(v, said[name], AXES)[rank] for name, v in _values().items()}
    model = Model(mine, sums=types["down"]["tp"] != R)
    declare(model, types)
    optimizer = make(model)
    with set_current_mesh(mesh), typecheck():
        x, y = (assert_type(mine[name], INPUT) for name in ("x", "y"))
        for _ in range(STEPS):
            model.zero_grad()
            loss = ((model(x) - y) ** 2).sum()
            convert(loss, "tp", src=R, dst=I).backward()
            then(model)
            optimizer.step()
        return _state(model, optimizer)
