"""Parameters cut as their type says, with values that do not depend on the mesh.

Row r of a parameter's global leading dim is drawn from a generator of its own, seeded by
the seed, the parameter's name and r. So every rank draws what it holds and no more, equal
where ranks hold equal rows, and a layer on any mesh starts from the same global weights.

Numbers are drawn on the CPU in float32, whatever the parameter's device and dtype, and
rounded to its dtype. So a layer made in bfloat16 has the weights of one made in float32,
rounded, and a layer made on the meta device has those of one made at once, when they are
drawn at last.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from placements import (
    Mesh,
    Shard,
    WatchesItsState,
    assert_type,
    declarations,
    forget_factory,
    type_of,
    unchecked,
)
from spmd_moe.layouts import Types


@dataclass(frozen=True)
class Spec:
    """A parameter: its global shape, and how `types` cut it on `mesh`."""

    shape: tuple[int, ...]
    types: Types
    mesh: Mesh

    def rows(self, dim: int) -> range:
        """Return the global rows of `dim` that this rank holds; cuts are even."""
        start, size = 0, self.shape[dim]
        for axis, t in self.types.items():
            if isinstance(t, Shard) and t.dim == dim and axis in self.mesh.sizes:
                assert size % self.mesh.sizes[axis] == 0, (self, dim)
                size //= self.mesh.sizes[axis]
                start += self.mesh.coordinate[axis] * size
        return range(start, start + size)

    def held(self) -> list[range]:
        """Return the global rows of every dim that this rank holds."""
        return [self.rows(dim) for dim in range(len(self.shape))]


class Initialised(WatchesItsState):
    """A module whose state can be made again as construction made it.

    A constructor declares the parameters and ends with `reset_own`. The seed and the name
    that numbers are drawn from are those of construction: FSDP2, among others, gives a
    module another class.
    """

    specs: Mapping[str, Spec] = {}
    meshes: tuple[Mesh, ...] = ()  # on which the module's parameters live
    seed: int = 0
    drawn_as: str = ""

    def declare_specs(
        self,
        specs: Mapping[str, Spec],
        seed: int,
        *,
        device: "torch.device | str | None" = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Register an unfilled parameter for every spec."""
        if dtype is not None and not isinstance(dtype, torch.dtype):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"dtype ({dtype!r}) must be a torch.dtype, such as torch.bfloat16, or None"
            )
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(
                f"dtype ({dtype}) must be a floating-point dtype, such as torch.bfloat16: "
                "the parameters get it"
            )
        self.specs, self.seed, self.drawn_as = specs, seed, type(self).__name__
        # Who wraps the module (FSDP2, DDP) is held to the types on these meshes.
        self.meshes = tuple({id(s.mesh): s.mesh for s in specs.values()}.values())
        for name, spec in specs.items():
            shape = [len(rows) for rows in spec.held()]
            empty = torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty))

    def reset_own(self) -> None:
        """Fill the parameters and buffers of this module, not of the modules below."""
        for name, spec in self.specs.items():
            key = f"{self.drawn_as}.{name}"
            draw_(self.get_parameter(name), spec, key, self.seed)

    def before_loading(self, state: dict[str, Any], prefix: str) -> None:
        """Refuse a value that has another type than its name is declared with.

        Most values have no type, because files hold none: whoever loads them answers for
        what they are on the other ranks.
        """
        for name, types in declarations(self).items():
            value = state.get(prefix + name)
            known = type_of(value) if isinstance(value, Tensor) else None
            if known is not None and known.fresh is None:
                assert_type(cast(Tensor, value), types)

    def after_loading(self, state: dict[str, Any], prefix: str) -> None:
        for name in declarations(self):
            forget_factory(getattr(self, name))

    def reset_parameters(self) -> None:
        """Give all state, here and in the modules below, the values of construction.

        To be called after `to_empty`, which leaves memory as it finds it. What is on the
        meta device has no values and stays as it is. Communicates nothing.
        """
        for module in self.modules():
            if isinstance(module, Initialised):
                module.reset_own()
            elif callable(reset := getattr(module, "reset_parameters", None)):
                reset()


def fill_(tensor: Tensor, value: float) -> None:
    """Fill a tensor with one number, whatever its type says."""
    with torch.no_grad(), unchecked():
        tensor.fill_(value)
        forget_factory(tensor)


def draw_(parameter: Tensor, spec: Spec, name: str, seed: int) -> None:
    """Fill a parameter with its part of normal numbers of deviation 1/sqrt(fan-in)."""
    if parameter.is_meta:
        return
    scale = 1 / math.sqrt(spec.shape[-1])
    with torch.no_grad(), unchecked():  # not yet declared, so there is nothing to check
        local, held = _local_part(parameter, spec.held())
        for here, row in enumerate(held[0]):
            generator = _generator(seed, name, row)
            whole = torch.randn(
                spec.shape[1:], generator=generator, device="cpu", dtype=torch.float32
            )
            local[here].copy_(_cut(whole, held[1:]) * scale)
        forget_factory(parameter)


def _local_part(parameter: Tensor, held: list[range]) -> tuple[Tensor, list[range]]:
    """Return the memory of this rank, and its global rows in every dim.

    FSDP2 makes a DTensor of a parameter, and this rank then has a part of what `held` says.
    Every rank finds its part by itself.
    """
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return parameter, held
    from torch.distributed import tensor as dtensor  # only where it is in use

    own = cast(Any, parameter)
    if any(type(p) not in (dtensor.Shard, dtensor.Replicate) for p in own.placements):
        raise TypeError(
            f"a parameter that is a DTensor with placements {own.placements} cannot be "
            "filled row by row: expected Shard and Replicate only; call reset_parameters() "
            "before it is distributed"
        )
    here: list[range] = []
    for dim, rows in enumerate(held):
        cut = [
            dtensor.Shard(0) if p.is_shard(dim) else dtensor.Replicate()
            for p in own.placements
        ]
        numbers = torch.arange(len(rows), device="cpu")
        mine: Any = dtensor.distribute_tensor(numbers, mesh, cut, src_data_rank=None)
        numbers = mine.to_local()
        first = int(numbers[0]) if len(numbers) else 0
        here.append(rows[first : first + len(numbers)])
    return own.to_local(), here


def _cut(row: Tensor, held: Sequence[range]) -> Tensor:
    for dim, rows in enumerate(held):
        row = row.narrow(dim, rows.start, len(rows))
    return row


def _generator(*key: object) -> torch.Generator:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=7).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big"))
