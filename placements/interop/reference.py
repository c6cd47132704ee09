"""What a program means on one device, and whether ranks that run it compute that.

A value of type t is held as `meaning.join` gives it: the global tensor, with one leading
dim for every Varying axis. A collective that keeps the value is the identity here; a
`reinterpret` splits by the old type and joins by the new one. The program then runs on
all ranks, forward and backward, under the checker, with every input cut by its type and
every Partial written as drawn summands; all values and the gradients of the last one
must join to what one device computes.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

import placements
from placements.inference.transitions import find
from placements.interop.engines import Ours, evaluate
from placements.interop.fake_world import quiet
from placements.interop.programs import FLOAT, Input, Program, Step
from placements.types.axis import Partial, Shard, V, Varying
from placements.types.meaning import join, split
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType, make

_TOLERANCE = 1e-7


class Unequal(Exception):  # noqa: N818 - a finding
    """Ranks that ran an accepted program did not compute its meaning."""


def check_sound(program: Program, types: Sequence[TensorType], seed: int = 0) -> bool:
    """Compare all ranks with one device; `types` are those of all values, inputs first.

    Raises Unequal if they differ; False if one device itself has no finite result.
    """
    with quiet():
        return _check_sound(program, types, seed)


def _check_sound(program: Program, types: Sequence[TensorType], seed: int) -> bool:
    mesh = program.mesh
    generator = torch.Generator().manual_seed(seed)
    leaves, values = _drawn(program, types, generator)
    if not values or not all(bool(value.isfinite().all()) for value in values):
        return False
    last, result_type = values[-1], types[-1]
    cotangent = torch.randn(last.shape, generator=generator, dtype=torch.float64)
    pieces = [
        _pieces(x.detach(), t, mesh, generator) for x, t in zip(leaves, types, strict=False)
    ]
    seeds = _pieces(cotangent, result_type.dual(), mesh, generator)
    ranks = _on_ranks(program, pieces, seeds)
    for k, (value, t) in enumerate(zip(values, types, strict=True)):
        held = [rank[0][k] for rank in ranks]
        _compare(program, f"x{k}, {t!r},", held, t, value.detach())
    if last.requires_grad and ranks[0][1]:
        floats = [k for k, x in enumerate(program.inputs) if x.kind == FLOAT]
        wanted = _gradients(last, [leaves[k] for k in floats], cotangent)
        for place, (k, grad) in enumerate(zip(floats, wanted, strict=True)):
            held = [rank[1][place] for rank in ranks]
            _compare(program, f"gradient of x{k}", held, types[k].dual(), grad)
    return True


def _drawn(
    program: Program, types: Sequence[TensorType], generator: torch.Generator
) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs, and all values on one device; none if torch refuses an index."""
    leaves: list[Tensor] = []
    for bound in (2, 1):  # an index may be too large for the dim that it meets
        leaves = [_leaf(x, program.mesh, generator, bound) for x in program.inputs]
        try:
            return leaves, _on_one_device(program, types, leaves)
        except (IndexError, RuntimeError):
            continue
    return leaves, []


def _leaf(x: Input, mesh: Mesh, generator: torch.Generator, bound: int) -> Tensor:
    varying = [mesh.sizes[a] for a, t in x.type_on(mesh).items() if isinstance(t, Varying)]
    shape = (*varying, *x.shape)
    if x.kind != FLOAT:
        return torch.randint(0, bound, shape, generator=generator)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return drawn.requires_grad_()


def _with(t: TensorType, axes: Sequence[str]) -> TensorType:
    """The same type, Varying on these axes."""
    return make(t.mesh, {axis: V if axis in axes else one for axis, one in t.items()})


def _pieces(
    value: Tensor, t: TensorType, mesh: Mesh, generator: torch.Generator
) -> list[Tensor]:
    """What every rank holds of a value; a Partial is written as drawn summands."""
    partial = [axis for axis in mesh.axes if isinstance(t[axis], Partial)]
    leading = [axis for axis in mesh.axes if isinstance(t[axis], Partial | Varying)]
    for axis in partial:
        others = [
            torch.randn(value.shape, generator=generator, dtype=value.dtype)
            for _ in range(mesh.sizes[axis] - 1)
        ]
        value = torch.stack([value - sum(others), *others], leading.index(axis))
    return split(value, _with(t, partial), mesh)


def regrouped(value: Tensor, old: TensorType, new: TensorType) -> Tensor:
    """The same local data under another type: `reinterpret`."""
    return join(split(value, old, old.mesh), new, new.mesh)


def _on_one_device(
    program: Program, types: Sequence[TensorType], leaves: Sequence[Tensor]
) -> list[Tensor]:
    values = list(leaves)
    for step, t in zip(program.steps, types[len(leaves) :], strict=True):
        if step.move is not None:
            k = step.args[0]
            values.append(_moved(values[k], types[k], t, step))
        else:
            values.append(_computed(values, types, t, step))
    return values


def _moved(value: Tensor, old: TensorType, new: TensorType, step: Step) -> Tensor:
    assert step.move is not None
    call, axis, src, dst = step.move
    row = None if repr(src) == repr(dst) and call != "all_to_all" else find(call, src, dst)
    if row is None:
        return value
    varying = [a for a in old.mesh.axes if isinstance(old[a], Varying)]
    others = [a for a in varying if a != axis]
    at = sum(a in varying for a in old.mesh.axes[: old.mesh.position[axis]])
    match row.action:
        case "stack" | "place row":
            return value.movedim(at, len(others))
        case "unbind" | "sum and unbind":
            return value.movedim(len(others), at)
        case "exchange":
            shape, rows, ranks = value.shape, len(varying), old.mesh.sizes[axis]
            runs = value.reshape(*shape[:rows], ranks, -1, *shape[rows + 1 :])
            return runs.transpose(at, rows).flatten(rows, rows + 1)
        case _:
            return regrouped(value, old, new) if row.call == "reinterpret" else value


def _outside(t: TensorType, forgotten: Sequence[str]) -> Iterator[str]:
    """Axes that cut a dim outside of a cut that is forgotten: they are no cut any more."""
    for axis in forgotten:
        cut = t[axis]
        if isinstance(cut, Shard):
            order = t.order(cut.dim)
            yield from order[: order.index(axis)]


def _computed(
    values: Sequence[Tensor], types: Sequence[TensorType], t: TensorType, step: Step
) -> Tensor:
    mesh = t.mesh
    apart = [
        axis
        for axis in mesh.axes
        if any(isinstance(types[k][axis], Varying) for k in step.args)
    ]
    said = [axis for axis in mesh.axes if isinstance(t[axis], Varying)]
    may = {*apart, *(a for k in step.args for a in _outside(types[k], apart))}
    assert {*apart} <= {*said} <= may, (
        f"{step.text} of Varying values on {apart} is said to be {t!r}"
    )
    apart = said
    spread = {
        k: regrouped(values[k], types[k], _with(types[k], apart)) for k in {*step.args}
    }
    results: list[Tensor] = []
    for place in product(*(range(mesh.sizes[axis]) for axis in apart)):
        here = [spread[k][place] if k in spread else None for k in range(len(values))]
        if ".unflatten(" in step.text:  # sizes in the text are those of one rank
            results.append(_unflattened(here, t, step))
        else:
            results.append(evaluate(step.text, here, {}))
    sizes = [mesh.sizes[axis] for axis in apart]
    return torch.stack(results).reshape((*sizes, *results[0].shape))


def _unflattened(values: Sequence[Any], t: TensorType, step: Step) -> Tensor:
    value = values[step.args[0]]
    dim = int(step.text.split("(")[1].split(",")[0])
    cuts = [t.cuts(d) for d in (dim, dim + 1)]
    if cuts[0]:
        return value.unflatten(dim, (cuts[0][0][1].total, -1))
    if cuts[1]:
        return value.unflatten(dim, (-1, cuts[1][0][1].total))
    return evaluate(step.text, values, {})


def _on_ranks(
    program: Program, pieces: Sequence[Sequence[Tensor]], seeds: Sequence[Tensor]
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """All values and the gradients, by rank; no gradients where torch has none."""
    mesh = program.mesh
    if not program.communicates:
        return [
            _on_rank(program, mesh.seen_from(place), [p[r] for p in pieces], seeds[r])
            for r, place in enumerate(mesh.coordinates())
        ]
    from placements.testing import device_mesh, run_ranks

    def on_this_rank() -> tuple[list[Tensor], list[Tensor]]:
        r = dist.get_rank()
        return _on_rank(program, device_mesh(), [p[r] for p in pieces], seeds[r])

    return run_ranks(mesh.sizes, on_this_rank)


def _on_rank(
    program: Program, mesh: Any, held: Sequence[Tensor], seed: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    is_float = [x.kind == FLOAT for x in program.inputs]
    values: list[Any] = [
        x.clone().requires_grad_(floats) for x, floats in zip(held, is_float, strict=True)
    ]
    inputs = [x for x in values if x.requires_grad]
    with placements.set_current_mesh(mesh), placements.typecheck():
        for x, given in zip(values, program.inputs, strict=True):
            placements.assert_type(x, dict(given.types))
        for step in program.steps:
            values.append(evaluate(step.text, values, Ours.names))
    held_values = [value.detach() for value in values]
    last: Tensor = values[-1]
    if not last.requires_grad or last.shape != seed.shape:
        return held_values, []
    try:
        return held_values, _gradients(last, inputs, seed)
    except RuntimeError as error:
        if "invalid gradient" not in str(error):  # torch has no derivative for it
            raise
        return held_values, []


def _gradients(last: Tensor, inputs: Sequence[Tensor], seed: Tensor) -> list[Tensor]:
    # torch's own annotation forgets that an unused input has no gradient.
    found = cast(
        Sequence[Tensor | None],
        torch.autograd.grad(last, inputs, seed, allow_unused=True),
    )
    return [
        torch.zeros_like(x) if grad is None else grad
        for x, grad in zip(inputs, found, strict=True)
    ]


def _compare(
    program: Program, what: str, held: Sequence[Tensor], t: TensorType, wanted: Tensor
) -> None:
    try:
        found = join(held, t, program.mesh)
        torch.testing.assert_close(found, wanted, rtol=_TOLERANCE, atol=_TOLERANCE)
    except (AssertionError, ValueError, RuntimeError) as error:
        raise Unequal(f"{program}: {what} is not what one device has: {error}") from error
