"""A module with uneven pieces on (dp, ep, tp), stepped with given global gradients.

All optimizers here work element by element, so what a rank computes on its pieces is, to
the bit, what one device computes on the whole.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from placements import Folded, I, Padded, R, Ragged, S, declare, split

VALUES: dict[str, Tensor] = {
    "gate.weight": torch.arange(36.0).view(12, 3),
    "experts.w_EDF": torch.arange(12 * 2 * 5.0).view(12, 2, 5).double(),
    "experts.bias_E": torch.arange(12),
    "embedding.weight": torch.arange(14.0).view(7, 2),
    "ragged.weight": torch.arange(14.0).view(7, 2),
    "folded.weight": torch.arange(10.0).to(torch.bfloat16),
    "nested.weight": torch.arange(24.0).view(12, 2),
    "nobody.weight": torch.zeros(0, 4),
    "number.weight": torch.tensor(3.0),
}


RAGGED = {1: Ragged(7), 2: Ragged(5, 2), 3: Ragged(4, 2, 1)}
# What FSDP2 does not take: a number, and pieces without rows.
NOT_FOR_FSDP = ("number.weight", "nobody.weight", "embedding.weight")


def types_on(mesh: dict[str, int]) -> dict[str, Any]:
    """Uneven where it can be: 7 rows on one rank; 5 columns; 2 blocks of 5; two cuts."""
    ragged = Ragged(7, *[0] * (mesh["tp"] - 1))
    types: dict[str, Any] = {
        "gate.weight": {"ep": R, "tp": I},
        "experts.w_EDF": {"ep": S(0), "tp": S(2, Padded(5))},
        "experts.bias_E": {"ep": S(0), "tp": I},
        "embedding.weight": {"ep": R, "tp": S(0, ragged)},
        "ragged.weight": {"ep": R, "tp": S(0, RAGGED[mesh["tp"]])},
        "folded.weight": {"ep": R, "tp": S(0, Folded(2, Padded(5)))},
        "nested.weight": {"tp": S(0), "ep": S(0, Padded(12 // mesh["tp"]))},
        "nobody.weight": {"ep": S(1, Padded(4)), "tp": R},
        "number.weight": {"ep": R, "tp": I},
    }
    return {name: {"dp": R, **said} for name, said in types.items()}


class Layer(nn.Module):
    """This rank's pieces of VALUES, or of zeros; a buffer among them."""

    def __init__(self, mesh: dict[str, int], rank: int, *, filled: bool) -> None:
        super().__init__()
        for name, types in types_on(mesh).items():
            owner, leaf = name.split(".")
            if not hasattr(self, owner):
                self.add_module(owner, nn.Module())
            value = VALUES[name] if filled else torch.zeros_like(VALUES[name])
            piece = split(value, types, mesh)[rank]
            if leaf == "bias_E":
                self.get_submodule(owner).register_buffer(leaf, piece)
            else:
                self.get_submodule(owner).register_parameter(leaf, nn.Parameter(piece))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        declare(self, types_on(mesh))


class Lion(torch.optim.Optimizer):
    """An optimizer as users write them: one moment, a number that is no tensor."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.125, "betas": (0.5, 0.75)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                moment = state.setdefault("moment", torch.zeros_like(p))
                state["steps"] = state.get("steps", 0) + 1
                p.add_((moment * first + p.grad * (1 - first)).sign(), alpha=-group["lr"])
                moment.mul_(second).add_(p.grad, alpha=1 - second)


Make = Callable[[nn.Module], torch.optim.Optimizer]


def _groups(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups, one of them with a learning rate of its own."""
    named = dict(module.named_parameters())
    gate = [p for name, p in named.items() if "gate" in name]
    others = [p for name, p in named.items() if "gate" not in name]
    return [{"params": gate, "lr": 0.5}, {"params": others}]


OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda m: torch.optim.AdamW(_groups(m), lr=0.25),
    "AdamW amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=0.25, amsgrad=True),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.5, dampening=0.5),
    "plain SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.5),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.5),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.5),
    "Lion": lambda m: Lion(m.parameters()),
}


def gradient(name: str, step: int) -> Tensor:
    value = VALUES[name]
    generator = torch.Generator().manual_seed(1000 * step + len(name))
    drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    return drawn.to(value.dtype)


def stepped(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    mesh: dict[str, int],
    rank: int,
) -> None:
    """Step with this rank's pieces of the gradients; `number.weight` never gets one."""
    for step in steps:
        for name, p in module.named_parameters():
            if name == "number.weight":
                continue
            piece = split(gradient(name, step), types_on(mesh)[name], mesh)[rank]
            asked: Any = p
            if hasattr(p, "device_mesh"):
                piece = distribute_tensor(
                    piece, asked.device_mesh, asked.placements, src_data_rank=None
                )
            p.grad = piece
        optimizer.step()


ONE = {"dp": 1, "ep": 1, "tp": 1}


def on_one_device(make: Make, steps: int) -> dict[str, Tensor]:
    """Parameters and moments after so many steps, by the keys of a checkpoint."""
    layer = Layer(ONE, 0, filled=True)
    optimizer = make(layer)
    stepped(layer, optimizer, range(steps), ONE, 0)
    return values_of(layer, optimizer)


def values_of(layer: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {f"model.{name}": t for name, t in layer.state_dict().items()}
    for name, p in layer.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            found[f"optimizer.{key}.{name}"] = torch.as_tensor(value)
    return found
