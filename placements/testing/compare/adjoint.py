"""The dot-product test: is the backward of a distributed function the adjoint?

For a function f with derivative A, `<A dx, w> = <dx, A^T w>` for every tangent dx that
respects the types of the inputs and every cotangent w that respects the dual of the
types of the outputs. A reduction that is missing or done twice breaks it. The sum over
ranks cannot tell where a summand is, so what a type calls equal is compared rank by rank:
that finds a reduction in the wrong place. Each input is perturbed alone, so that the
guilty one is named.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from placements.runtime.mesh import set_current_mesh
from placements.testing.compare.adjoint_arguments import (
    ByRank,
    Types,
    checked_inputs,
    checked_outs,
    class_of,
    mesh_of_sizes,
    parts_of,
    taken_by_name,
)
from placements.testing.draw.whole_numbers import seeded
from placements.testing.ranks.run import device_mesh, run_ranks
from placements.types.axis import Partial, TypesLike, Varying, dual
from placements.types.meaning import join, split
from placements.types.mesh import Mesh

# A central difference is off by STEP**2 / 6 of the third derivative, and by the rounding
# of the values over STEP: both about 2e-11, so a tolerance of 1e-6 leaves much room. Both
# sides of the comparison are sums of terms that may cancel, so it is relative to the sizes
# of the terms; a wrong reduction of n terms is off by about 1 / sqrt(n) of those.
STEP = 1e-5
# Rounding of values, relative to their sizes: 100 units in the last place, since inside
# `fn` there are larger ones. It matters where results hardly change: over STEP it is 2e-9,
# and a derivative that is less of the values than that cannot be judged.
ROUNDING = 100 * torch.finfo(torch.float64).eps


def check_adjoint(
    fn: Callable[..., Any],
    inputs: Mapping[str, tuple[Tensor, TypesLike]],
    outs: TypesLike | Sequence[TypesLike],
    *,
    mesh: Mapping[str, int],
    seed: int = 0,
    tolerance: float = 1e-6,
) -> None:
    """Raise AssertionError, naming the input, if the backward of `fn` is not its adjoint.

    `fn` is called on every simulated rank with its parts of the inputs, by name (in order
    if it takes `*args`); `inputs` gives each input's global value (float64; for Varying
    axes one leading dim per axis) and type, `outs` the type of each result. Types name
    every mesh axis of more than one rank. Nothing is type-checked, so that wrong programs
    can be shown wrong; but results that `outs` calls equal on the ranks of an axis must
    be. `fn` must be smooth where it is tried (freeze routing), and compute in float64.
    `tolerance` is relative to the sizes of the terms of both dot products.

        >>> check_adjoint(lambda x: x * 2, {"x": (torch.ones(4).double(), {"tp": "S(0)"})},
        ...               {"tp": "S(0)"}, mesh={"tp": 2})
    """
    sizes = mesh_of_sizes(mesh)
    given = checked_inputs(inputs, sizes)
    claims = checked_outs(outs, sizes)
    by_name = taken_by_name(fn, list(given))
    held = {
        name: parts_of(name, value, types, sizes) for name, (value, types) in given.items()
    }
    tangents = {
        name: _drawn(value.shape, types, sizes, seed, name)
        for name, (value, types) in given.items()
    }
    returned = run_ranks(dict(mesh), _returned, fn, by_name, held)
    results = _results(returned, claims, sizes, tolerance)
    weights = [
        [_cotangent(y, types, sizes, rank, seed, k) for rank, y in enumerate(ys)]
        for k, (ys, types) in enumerate(zip(results, claims, strict=True))
    ]
    found = run_ranks(dict(mesh), _derivatives, fn, by_name, held, tangents, weights)
    values = sum(
        _dot(ys, ws, types, sizes)[1]
        for ys, ws, types in zip(results, weights, claims, strict=True)
    )
    for name, (_, types) in given.items():
        gradients = [gradient[name] for gradient, _ in found]
        _finite(gradients, f"the gradient of {name}")
        duals = {axis: dual(t) for axis, t in types.items()}
        must = f"{name} is {types}, so its gradient must be {duals}"
        unequal = _unequal(gradients, duals, sizes, tolerance, ROUNDING * values)
        if unequal:
            raise AssertionError(
                f"the gradient of {name} is not the adjoint: {unequal}. {must}"
            )
        changes = [change[name] for _, change in found]
        _check_changes(name, changes, results, claims, sizes, tolerance)
        right, size = _dot(tangents[name], gradients, types, sizes)
        left = 0.0
        for k, claim in enumerate(claims):
            by_rank = [change[k] for change in changes]
            dot, of_terms = _dot(by_rank, weights[k], claim, sizes)
            left, size = left + dot, size + of_terms
        if abs(left - right) > tolerance * size + ROUNDING / STEP * values:
            ratio = f", {right / left + 0.0:.4g} times as much" if left else ""
            raise AssertionError(
                f"the gradient of {name} is not the adjoint: <dy, w> = {left:.6g}, but "
                f"<dx, gradient> = {right:.6g}{ratio}. {must}"
            )


def _check_changes(
    name: str,
    changes: Sequence[Sequence[Tensor]],
    results: Sequence[ByRank],
    claims: Sequence[Types],
    mesh: Mesh,
    tolerance: float,
) -> None:
    """Check that results change as `outs` says; where all are zero, only changes differ."""
    for k, claim in enumerate(claims):
        by_rank = [change[k] for change in changes]
        what = f"the change of result {k} with {name}"
        _finite(by_rank, what)
        noise = ROUNDING / STEP * max(map(_largest, results[k]))
        unequal = _unequal(by_rank, claim, mesh, tolerance, noise)
        if unequal:
            raise AssertionError(f"{what} is not {claim}: {unequal}")


def _drawn(shape: Sequence[int], types: Types, mesh: Mesh, seed: int, name: str) -> ByRank:
    """Return a random tensor of that type, by rank; summands of a Partial are drawn too."""
    generator = seeded(seed, name)
    value = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    parts = split(value, types, mesh)
    for axis, t in types.items():
        if not isinstance(t, Partial):
            continue
        for r, place in enumerate(mesh.coordinates()):
            noise = seeded(seed, name, axis, {
                a: place[a] for a in types if a != axis and types[a].letter not in "RI"
            })  # fmt: skip
            drawn = torch.randn(parts[r].shape, generator=noise, dtype=torch.float64)
            # what the first rank adds the last one takes away
            sign = {0: 1.0, mesh.sizes[axis] - 1: -1.0}.get(place[axis], 0.0)
            parts[r] = parts[r] + sign * drawn
    return parts


def _cotangent(y: Tensor, types: Types, mesh: Mesh, rank: int, seed: int, k: int) -> Tensor:
    """Return a cotangent of the dual type, equal where that is Replicate or Invariant."""
    place = mesh.coordinates()[rank]
    own = {axis: place[axis] for axis, t in types.items() if dual(t).letter not in "RI"}
    generator = seeded(seed, "w", k, own)
    return torch.randn(y.shape, generator=generator, dtype=y.dtype)


def _called(fn: Callable[..., Any], by_name: bool, xs: Mapping[str, Tensor]) -> Any:
    return fn(**xs) if by_name else fn(*xs.values())


def _own(held: Mapping[str, ByRank]) -> dict[str, Tensor]:
    return {name: xs[dist.get_rank()].requires_grad_() for name, xs in held.items()}


def _returned(fn: Callable[..., Any], by_name: bool, held: Mapping[str, ByRank]) -> Any:
    """Return what `fn` returns on this rank, whatever it is."""
    with set_current_mesh(device_mesh()):
        return _called(fn, by_name, _own(held))


def _listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _derivatives(
    fn: Callable[..., Any],
    by_name: bool,
    held: Mapping[str, ByRank],
    tangents: Mapping[str, ByRank],
    weights: Sequence[ByRank],
) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    """Return each input's gradient, and how fast results change along its tangent."""
    rank = dist.get_rank()
    xs = _own(held)
    with set_current_mesh(device_mesh()):
        ys = _listed(_called(fn, by_name, xs))
        live = [(y, w[rank]) for y, w in zip(ys, weights, strict=True) if y.requires_grad]
        gradients = {name: torch.zeros_like(x) for name, x in xs.items()}
        if live:
            found = torch.autograd.grad(
                [y for y, _ in live],
                list(xs.values()),
                [w for _, w in live],
                materialize_grads=True,
            )
            gradients = dict(zip(xs, found, strict=True))
        changes: dict[str, list[Tensor]] = {}
        with torch.no_grad():
            for name, x in xs.items():
                step = STEP * tangents[name][rank]
                ahead = _listed(_called(fn, by_name, {**xs, name: x + step}))
                behind = _listed(_called(fn, by_name, {**xs, name: x - step}))
                changes[name] = [
                    (a - b) / (2 * STEP) for a, b in zip(ahead, behind, strict=True)
                ]
    return gradients, changes


def _results(
    returned: Sequence[Any], claims: Sequence[Types], mesh: Mesh, tolerance: float
) -> list[ByRank]:
    """Return each result by rank, once it is what `outs` says."""
    for result in returned:
        listed = [result] if isinstance(result, Tensor) else result
        if not isinstance(listed, list | tuple) or not all(
            isinstance(y, Tensor) for y in cast(Sequence[object], listed)
        ):
            raise ValueError(
                "check_adjoint: fn must return a tensor, or a tuple or list of tensors; "
                f"it returned {class_of(result)}"
            )
        count = len(cast(Sequence[object], listed))
        if count != len(claims):
            raise ValueError(
                f"check_adjoint: fn returned {count} tensors, but outs has the types of "
                f"{len(claims)}; give a list with the types of each result"
            )
    results = [list(ys) for ys in zip(*map(_listed, returned), strict=True)]
    for k, (ys, types) in enumerate(zip(results, claims, strict=True)):
        results[k] = [y.detach() for y in ys]
        for y in ys:
            if y.dtype != torch.float64:
                raise ValueError(
                    f"check_adjoint: result {k} is {y.dtype}, must be float64; compute it "
                    "in float64 throughout, or leave out a result that has no gradient"
                )
        _finite(results[k], f"result {k}")
        unequal = _unequal(results[k], types, mesh, tolerance, 0.0)
        if unequal:
            raise AssertionError(f"result {k} is not {types}: {unequal}")
        _fits(results[k], types, mesh, k)
    return results


def _fits(ys: ByRank, types: Types, mesh: Mesh, k: int) -> None:
    """Raise ValueError if the shapes of the ranks are not those of pieces or summands."""
    joined = {axis: t for axis, t in types.items() if not isinstance(t, Varying)}
    part = Mesh({axis: n for axis, n in mesh.sizes.items() if axis in joined})
    groups: dict[str, ByRank] = {}  # Varying values may have any shapes
    for y, place in zip(ys, mesh.coordinates(), strict=True):
        varying = {axis: place[axis] for axis in types if axis not in joined}
        groups.setdefault(repr(varying), []).append(torch.zeros_like(y))
    try:
        for group in groups.values():
            join(group, joined, part)
    except (ValueError, RuntimeError) as error:  # RuntimeError: torch's, of the shapes
        raise ValueError(
            f"check_adjoint: result {k} cannot be {types}: {error}. Its shapes by rank: "
            f"{[tuple(y.shape) for y in ys]}"
        ) from None


def _finite(locals_: ByRank, what: str) -> None:
    for rank, value in enumerate(locals_):
        if not bool(value.isfinite().all()):
            raise AssertionError(
                f"{what} is not finite on rank {rank}; try fn where it is smooth"
            )


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _unequal(
    locals_: ByRank, types: Types, mesh: Mesh, tolerance: float, noise: float
) -> str | None:
    """Say which ranks hold different values on an axis where a type calls them equal."""
    places = mesh.coordinates()
    for axis in (axis for axis, t in types.items() if t.letter in "RI"):
        for rank, place in enumerate(places):
            first = places.index({**place, axis: 0})
            a, b = locals_[first], locals_[rank]
            if a.shape != b.shape:
                how = f"its shapes are {tuple(a.shape)} and {tuple(b.shape)}"
            elif _largest(a - b) > tolerance * max(_largest(a), _largest(b)) + noise:
                how = f"it differs by up to {_largest(a - b):.4g}"
            else:
                continue
            return (
                f"on axis {axis!r} it must be equal, but on ranks {first} and {rank} {how}"
            )
    return None


def _dot(a: ByRank, b: ByRank, types: Types, mesh: Mesh) -> tuple[float, float]:
    """Return <a, b> over all ranks, and the size of its terms, which may cancel.

    All ranks of an Invariant axis repeat one dot product.
    """
    repeated = 1
    for axis, t in types.items():
        repeated *= mesh.sizes[axis] if t.letter == "I" else 1
    terms = [x * y for x, y in zip(a, b, strict=True)]
    total = sum(float(t.sum()) for t in terms) / repeated
    return total, sum(float(t.abs().sum()) for t in terms) / repeated
