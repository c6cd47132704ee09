"""One case: a typed function on simulated ranks against a reference on one device.

The ranks run under the checker, with real communication; results and gradients are
joined by the types that the checker inferred.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from placements.declarations import assert_type, type_of
from placements.errors import PlacementError
from placements.extents import Padded
from placements.meaning import split
from placements.mesh import Mesh, as_mesh, set_current_mesh
from placements.propagate import typecheck
from placements.tensor_type import TensorType, declared, make
from placements.testing.draws import numbers, seeded
from placements.testing.failures import RankFailure
from placements.testing.placed import join_ranks, part_of
from placements.testing.ranks import device_mesh, run_ranks
from placements.types import AxisType, Shard, TypesLike, as_axis_type

Placed = tuple[Tensor, TypesLike]


def check_spmd_case(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Mapping[str, Placed],
    *,
    mesh: Mapping[str, int],
    seed: int = 0,
) -> bool:
    """One case: `fn` on simulated ranks against `reference` on one device.

    `inputs` gives each argument's global value and type. False if the checker refuses;
    AssertionError if results or gradients differ.
    """
    sizes = Mesh(mesh)
    try:
        ranks = run_ranks(dict(mesh), _one_rank, fn, dict(inputs), seed)
    except RankFailure as failure:
        # A rank that refuses alone leaves the others waiting: refused all the same.
        if isinstance(failure.cause, PlacementError):
            return False
        raise
    if any(rank is None for rank in ranks):
        return False
    for rank in ranks:
        if isinstance(rank, RuntimeError):
            raise AssertionError(f"a rank raised {rank!r}") from rank
    done = [rank for rank in ranks if isinstance(rank, _Rank)]
    values = {
        name: value.clone().requires_grad_(value.is_floating_point())
        for name, (value, _) in inputs.items()
    }
    wanted = _tensors(reference(**values))
    assert len(wanted) == len(done[0].outputs), "as many results as the reference has"
    for k, target in enumerate(wanted):
        found = _joined([rank.outputs[k] for rank in done], sizes)
        _compare(found, target, f"result {k}")
    pairs = [
        (y, _cotangent(y.shape, seed, k)) for k, y in enumerate(wanted) if y.requires_grad
    ]
    names = [name for name, value in values.items() if value.requires_grad]
    gradients = (
        torch.autograd.grad(
            [y for y, _ in pairs], [values[n] for n in names], [w for _, w in pairs],
            allow_unused=True,
        )
        if pairs and names
        else [None] * len(names)
    )  # fmt: skip
    for name, gradient in zip(names, gradients, strict=True):
        found = _joined([rank.gradients[name] for rank in done], sizes)
        target = torch.zeros_like(values[name]) if gradient is None else gradient
        _compare(found, target, f"the gradient of {name}")
    return True


@dataclass(frozen=True)
class _Held:
    """A tensor on one rank, and its type there without the rank's own mesh."""

    value: Tensor
    types: dict[str, AxisType]


@dataclass(frozen=True)
class _Rank:
    outputs: list[_Held]
    gradients: dict[str, _Held]


def _one_rank(
    fn: Callable[..., Any], inputs: dict[str, Placed], seed: int
) -> _Rank | RuntimeError | None:
    """What this rank computes; None if the checker refuses, the error if torch does."""
    rank = dist.get_rank()
    held: dict[str, Tensor] = {}
    try:
        with set_current_mesh(device_mesh()), typecheck():
            mesh = as_mesh(device_mesh())
            for name, (value, types) in inputs.items():
                held[name] = _declared(name, value, types, mesh, rank, seed)
            results = _tensors(fn(**held))
            types = [type_of(y) for y in results]
    except PlacementError:
        return None
    except RuntimeError as error:  # shapes that do not fit here; elsewhere it is refused
        return error
    outputs = [
        _Held(y.detach(), dict(t if t is not None else {}))
        for y, t in zip(results, types, strict=True)
    ]
    pairs = [
        (y, _seed(y, t, seed, k))
        for k, (y, t) in enumerate(zip(results, types, strict=True))
        if y.requires_grad
    ]
    wanted = {name: x for name, x in held.items() if x.requires_grad}
    gradients = (
        torch.autograd.grad(
            [y for y, _ in pairs], list(wanted.values()), [w for _, w in pairs],
            allow_unused=True,
        )
        if pairs and wanted
        else [None] * len(wanted)
    )  # fmt: skip
    found: dict[str, _Held] = {}
    for (name, x), gradient in zip(wanted.items(), gradients, strict=True):
        t = type_of(x)
        filled = torch.zeros_like(x) if gradient is None else gradient
        found[name] = _Held(filled, dict(t.dual() if t is not None else {}))
    return _Rank(outputs, found)


def _declared(
    name: str, value: Tensor, types: TypesLike, mesh: Mesh, rank: int, seed: int
) -> Tensor:
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        types = _with_totals(value, types, mesh)
        shape = tuple(split(value, types, mesh.seen_from({}))[rank].shape)
        t = declared(mesh, types, shape)
        local = part_of(value, t, seeded(seed, "part", name))
        local = local.detach().requires_grad_(value.is_floating_point())
    return assert_type(local, t)


def _with_totals(value: Tensor, types: TypesLike, mesh: Mesh) -> dict[str, AxisType]:
    """Shards without an extent are cut like torch.chunk, as `split` does."""
    whole: dict[str, AxisType] = {}
    for axis, like in types.items():
        if mesh.sizes.get(axis) == 1:  # it cuts nothing, so it is no outer cut either
            continue
        t = as_axis_type(like)
        if isinstance(t, Shard) and t.extent is None:
            dim = t.dim % value.dim()
            seen = [x.dim for x in whole.values() if isinstance(x, Shard)]
            t = Shard(dim, None if dim in seen else Padded(value.shape[dim]))
        whole[axis] = t
    return whole


def _seed(y: Tensor, t: TensorType | None, seed: int, k: int) -> Tensor:
    """This rank's part of the cotangent of one result."""
    assert t is not None
    shape = t.global_shape(tuple(y.shape))
    return part_of(_cotangent(shape, seed, k), t.dual(), seeded(seed, "cotangent", k))


def _cotangent(shape: Sequence[int], seed: int, k: int) -> Tensor:
    drawn = numbers(shape, seeded(seed, "w", k))
    return drawn + (drawn == 0)


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _joined(held: Sequence[_Held], mesh: Mesh) -> Tensor:
    types = [
        make(mesh.seen_from(place), one.types)
        for place, one in zip(mesh.coordinates(), held, strict=True)
    ]
    (value,) = join_ranks([one.value for one in held], types, mesh).values()
    return value


def _compare(found: Tensor, wanted: Tensor, what: str) -> None:
    torch.testing.assert_close(
        found, wanted.detach(), rtol=1e-9, atol=1e-9, equal_nan=True,
        msg=lambda text: f"{what} differs from one device: {text}\n"
        f"on ranks {found}\non one device {wanted}",
    )  # fmt: skip
