"""The dot-product test: is the backward of a distributed function the adjoint?

For a function f with derivative A, `<A dx, w> = <dx, A^T w>` for every tangent dx that
respects the types of the inputs and every cotangent w that respects the dual of the
types of the outputs. A reduction that is missing, done twice or done in the wrong place
breaks it. Each input is perturbed alone, so that the guilty one is named.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from placements.duals import dual
from placements.meaning import split
from placements.mesh import Mesh, set_current_mesh
from placements.testing.draws import seeded
from placements.testing.ranks import device_mesh, run_ranks
from placements.types import AxisType, Partial, TypesLike, as_axis_type

STEP = 1e-5


def check_adjoint(
    fn: Callable[..., Any],
    inputs: Mapping[str, tuple[Tensor, TypesLike]],
    outs: TypesLike | Sequence[TypesLike],
    *,
    mesh: Mapping[str, int],
    seed: int = 0,
    tolerance: float = 1e-6,
) -> None:
    """AssertionError, naming the input, if the backward of `fn` is not its adjoint.

    `fn` is called on every simulated rank with its parts of the inputs; `inputs` gives
    each input's global value (float64; for Varying axes one leading dim per axis) and
    type, `outs` the type of each result. Nothing is type-checked, so that wrong programs
    can be shown wrong. `fn` must be smooth where it is tried: freeze routing.

        >>> check_adjoint(lambda x: x * 2, {"x": (torch.ones(4).double(), {"tp": "S(0)"})},
        ...               {"tp": "S(0)"}, mesh={"tp": 2})
    """
    for name, (value, _) in inputs.items():
        if value.dtype != torch.float64:
            raise ValueError(f"check_adjoint: {name} is {value.dtype}, must be float64")
    sizes = Mesh(mesh)
    results: list[TypesLike] = [outs] if isinstance(outs, Mapping) else list(outs)
    held = [split(value, types, sizes) for value, types in inputs.values()]
    tangents = [
        _drawn(value.shape, types, sizes, seed, name)
        for name, (value, types) in inputs.items()
    ]
    shares = [_share(types, sizes) for _, types in inputs.values()]
    found = run_ranks(
        dict(mesh), _one_rank, fn, held, tangents, results, shares, sizes, seed
    )
    for k, name in enumerate(inputs):
        left = sum(dots[k][0] for dots in found)
        right = sum(dots[k][1] for dots in found)
        scale = max(abs(left), abs(right), 1e-3)
        if abs(left - right) > tolerance * scale:
            ratio = f", {right / left:.4g} times as much" if abs(left) > 1e-9 else ""
            raise AssertionError(
                f"the gradient of {name} is not the adjoint: <dy, w> = {left:.6f}, but "
                f"<dx, gradient> = {right:.6f}{ratio}. {name} is "
                f"{dict(inputs[name][1])}, so its gradient must be "
                f"{ {a: dual(as_axis_type(t)) for a, t in inputs[name][1].items()} }"
            )


def _share(types: TypesLike, mesh: Mesh) -> float:
    """All ranks of an Invariant axis repeat one dot product."""
    share = 1.0
    for axis, t in types.items():
        if as_axis_type(t).letter == "I":
            share /= mesh.sizes.get(axis, 1)
    return share


def _drawn(
    shape: Sequence[int], types: TypesLike, mesh: Mesh, seed: int, name: str
) -> list[Tensor]:
    """A random tensor of that type, by rank; summands of a Partial are drawn too."""
    generator = seeded(seed, name)
    value = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    parts = split(value, types, mesh)
    whole: dict[str, AxisType] = {a: as_axis_type(t) for a, t in types.items()}
    for axis, t in whole.items():
        if not isinstance(t, Partial) or mesh.sizes.get(axis, 1) == 1:
            continue
        for r, place in enumerate(mesh.coordinates()):
            others = {a: p for a, p in place.items() if a != axis}
            noise = seeded(seed, name, axis, {
                a: p for a, p in others.items() if whole[a].letter not in "RI"
            })  # fmt: skip
            drawn = torch.randn(parts[r].shape, generator=noise, dtype=torch.float64)
            # what the first rank adds the last one takes away
            sign = {0: 1.0, mesh.sizes[axis] - 1: -1.0}.get(place[axis], 0.0)
            parts[r] = parts[r] + sign * drawn
    return parts


def _outputs(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _one_rank(
    fn: Callable[..., Any],
    held: list[list[Tensor]],
    tangents: list[list[Tensor]],
    outs: list[TypesLike],
    shares: list[float],
    mesh: Mesh,
    seed: int,
) -> list[tuple[float, float]]:
    """For each input, this rank's share of both dot products."""
    rank = dist.get_rank()
    xs = [x[rank].detach().clone().requires_grad_() for x in held]
    dots: list[tuple[float, float]] = []
    with set_current_mesh(device_mesh()):
        ys = _outputs(fn(*xs))
        weights = [
            _cotangent(y, types, mesh, rank, seed, k)
            for k, (y, types) in enumerate(zip(ys, outs, strict=True))
        ]
        found = torch.autograd.grad(ys, xs, weights, allow_unused=True)
        gradients = cast(tuple[Tensor | None, ...], found)
        for k, gradient in enumerate(gradients):
            dx = tangents[k][rank]
            left = 0.0
            with torch.no_grad():
                ahead = _outputs(fn(*_moved(xs, k, dx, STEP)))
                behind = _outputs(fn(*_moved(xs, k, dx, -STEP)))
            for a, b, w, types in zip(ahead, behind, weights, outs, strict=True):
                left += float(((a - b) / (2 * STEP) * w).sum()) * _share(types, mesh)
            right = 0.0 if gradient is None else float((dx * gradient).sum()) * shares[k]
            dots.append((left, right))
    return dots


def _moved(xs: Sequence[Tensor], k: int, dx: Tensor, by: float) -> list[Tensor]:
    return [x + by * dx if j == k else x for j, x in enumerate(xs)]


def _cotangent(
    y: Tensor, types: TypesLike, mesh: Mesh, rank: int, seed: int, k: int
) -> Tensor:
    """A cotangent of the dual type: the same on ranks where that is Replicate or I."""
    place = mesh.coordinates()[rank]
    own = {
        axis: p
        for axis, p in place.items()
        if axis not in types or dual(as_axis_type(types[axis])).letter not in "RI"
    }
    generator = seeded(seed, "w", k, own)
    return torch.randn(y.shape, generator=generator, dtype=y.dtype)
