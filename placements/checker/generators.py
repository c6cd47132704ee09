"""Random generators of ranks: make one for each rank, and read the states of all.

Ranks that were seeded alike draw alike. That is right for values that are equal on all
ranks, and wrong for pieces of one tensor, which need numbers of their own.
"""

import zlib
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from placements._torch import unseen
from placements.runtime import tags
from placements.runtime.blocks import Steps, block
from placements.runtime.callsite import name_of
from placements.runtime.mesh import check_axes, checked_mesh, current_mesh
from placements.runtime.state import AxesBlock, current, sharing
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType


class own_generator(AxesBlock):  # noqa: N801 - reads as what it gives
    """Inside, each rank of these axes draws random numbers of its own.

    The default generators are seeded from one number of the generator outside, which is
    equal where that is shared, and from this rank's place on `axes`. Afterwards they go
    on where they were, so ranks that drew alike before do so again.

        with own_generator("tp"):
            h_TD = dropout(x_TD)  # x_TD is S(0) on tp
    """

    def steps(self) -> Steps[None]:
        check_axes("own_generator", current_mesh(), self.axes)
        places = checked_mesh().place
        own = sorted((axis, places[axis]) for axis in self.axes if axis in places)
        with unseen():
            drawn = int(torch.randint(1 << 62, (), device="cpu"))
        key = blake2b(repr((drawn, own)).encode(), digest_size=8).digest()
        with sharing(current.shared_axes - frozenset(self.axes)), _forked():
            with unseen():
                torch.manual_seed(int.from_bytes(key, "little") >> 1)  # pyright: ignore[reportUnknownMemberType]
            yield


@block
def _forked() -> Steps[None]:
    """Put back the states of the CPU and of this process's device afterwards.

    As `torch.random.fork_rng`, which a signal can keep from putting them back.
    """
    cpu, device = torch.default_generator, _device_generator()
    with unseen():
        states = cpu.get_state(), None if device is None else device.get_state()
    try:
        yield
    finally:
        cpu.set_state(states[0])
        if device is not None:
            device.set_state(states[1])


def _device_generator() -> Any:
    """Return the default generator of this process's device; None without a device."""
    if not torch.accelerator.is_available():  # a CUDA build alone is no device
        return None
    device = torch.accelerator.current_accelerator()
    assert device is not None
    every: Any = torch.get_device_module(device).default_generators
    return every[torch.accelerator.current_device_index()]


def state_of(arguments: Iterable[Any]) -> int | None:
    """Return a number for the state of the generator that such a call uses."""
    generator: torch.Generator | None = None
    device: torch.device | None = None
    for arg in arguments:
        if isinstance(arg, torch.Generator):
            generator = arg
        elif device is None and isinstance(arg, Tensor | torch.device):
            device = arg.device if isinstance(arg, Tensor) else arg
    with unseen():
        state = _state(generator, device or torch.get_default_device())
        return None if state is None else zlib.crc32(cast(Any, state.numpy()))


def _state(generator: torch.Generator | None, device: torch.device) -> Tensor | None:
    if generator is not None:
        return generator.get_state()
    if device.type == "cpu":
        return torch.default_generator.get_state()
    if device.type == "meta":
        return None  # nothing is drawn
    return torch.get_device_module(device).get_rng_state(device)


class RandomOp(NamedTuple):
    """A random op that is about to run: for which value, and from which state."""

    known: TensorType | None  # the type of the value, if it has been said
    name: str
    shared: frozenset[str]
    arguments: tuple[Any, ...]
    state: int | None

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "RandomOp":
        arguments = (*args, *kwargs.values())
        target = next((a for a in arguments if isinstance(a, Tensor)), None)
        known = None if target is None else tags.get(target)
        name = None if target is None else name_of(target)
        shared = current.shared_axes
        return cls(known, name or "x", shared, arguments, state_of(arguments))

    def happened(self) -> bool:
        """Return whether the op drew numbers; dropout(p=0) draws none."""
        return self.state is not None and state_of(self.arguments) != self.state

    def letters(self) -> dict[str, str]:
        """Axis -> the letter of the value's type there, where the op claims something."""
        if self.known is None or self.known.fresh is not None:
            # Fresh numbers are still open to declaration, unless they are said equal.
            return {axis: "R" for axis in checked_mesh().axes if axis in self.shared}
        return {axis: t.letter for axis, t in self.known.items()}

    def mesh(self) -> Mesh:
        return checked_mesh() if self.known is None else self.known.mesh
