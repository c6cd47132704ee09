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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import placements
from placements.inference.transitions import find
from placements.interop.engines import Ours
from placements.interop.fake_world import quiet
from placements.testing.compare.one_device import check_value, gradients
from placements.testing.draw.placed import split_ranks
from placements.testing.draw.whole_numbers import nonzero_numbers
from placements.testing.programs import FLOAT, Input, Program, Statement, evaluate
from placements.testing.ranks.run import device_mesh, run_ranks
from placements.types.axis import Shard, V, Varying
from placements.types.meaning import join, split
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType, make


def check_on_ranks(program: Program, types: Sequence[TensorType], seed: int = 0) -> bool:
    """Compare all ranks with one device; `types` are those of all values, inputs first.

    Raises AssertionError if they differ; returns False if one device itself has no
    finite result.
    """
    with quiet():
        return _check_on_ranks(program, types, seed)


def _check_on_ranks(program: Program, types: Sequence[TensorType], seed: int) -> bool:
    mesh = program.mesh
    generator = torch.Generator().manual_seed(seed)
    leaves, values = _drawn(program, types, generator)
    if not values or not all(bool(value.isfinite().all()) for value in values):
        return False
    last, result_type = values[-1], types[-1]
    cotangent = nonzero_numbers(last.shape, generator)
    pieces = [
        _pieces(x.detach(), t, mesh, generator) for x, t in zip(leaves, types, strict=False)
    ]
    seeds = _pieces(cotangent, result_type.dual(), mesh, generator)
    ranks = _on_ranks(program, pieces, seeds)
    for k, (value, t) in enumerate(zip(values, types, strict=True)):
        _compare(f"{program}: x{k}, {t!r},", [rank[0][k] for rank in ranks], t, value)
    if ranks[0][1]:
        wanted = gradients([last], [cotangent], leaves)
        for k, (leaf, t) in enumerate(zip(leaves, types, strict=False)):
            if leaf.requires_grad:
                held = [_or_zeros(rank[1][k], rank[0][k]) for rank in ranks]
                what = f"{program}: gradient of x{k}"
                _compare(what, held, t.dual(), _or_zeros(wanted[k], leaf))
    return True


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


def _compare(what: str, held: Sequence[Tensor], t: TensorType, wanted: Tensor) -> None:
    try:
        found = join(held, t, t.mesh)
    except (ValueError, RuntimeError) as error:  # RuntimeError: torch's, of the shapes
        raise AssertionError(f"{what} is no global value: {error}") from error
    check_value(what, found, wanted)


def _drawn(
    program: Program, types: Sequence[TensorType], generator: torch.Generator
) -> tuple[list[Tensor], list[Tensor]]:
    """Return inputs, and all values on one device; none if torch refuses an index."""
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
    """Return the same type, Varying on these axes."""
    return make(t.mesh, {axis: V if axis in axes else one for axis, one in t.items()})


def _pieces(
    value: Tensor, t: TensorType, mesh: Mesh, generator: torch.Generator
) -> list[Tensor]:
    """Return what every rank holds of a value; a Partial is written as drawn summands."""
    types = [make(mesh.seen_from(place), t) for place in mesh.coordinates()]
    return split_ranks(lambda place: value[place], types, mesh, generator)


def regrouped(value: Tensor, old: TensorType, new: TensorType) -> Tensor:
    """Return the same local data under another type: `reinterpret`."""
    return join(split(value, old, old.mesh), new, new.mesh)


def _on_one_device(
    program: Program, types: Sequence[TensorType], leaves: Sequence[Tensor]
) -> list[Tensor]:
    values = list(leaves)
    for statement, t in zip(program.statements, types[len(leaves) :], strict=True):
        if statement.move is not None:
            k = statement.args[0]
            values.append(_moved(values[k], types[k], t, statement))
        else:
            values.append(_computed(values, types, t, statement))
    return values


def _moved(value: Tensor, old: TensorType, new: TensorType, statement: Statement) -> Tensor:
    assert statement.move is not None
    call, axis, src, dst = statement.move
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
    """Yield the axes that cut a dim outside of a forgotten cut, and so cut no more."""
    for axis in forgotten:
        cut = t[axis]
        if isinstance(cut, Shard):
            order = t.order(cut.dim)
            yield from order[: order.index(axis)]


def _computed(
    values: Sequence[Tensor],
    types: Sequence[TensorType],
    t: TensorType,
    statement: Statement,
) -> Tensor:
    mesh = t.mesh
    apart = [
        axis
        for axis in mesh.axes
        if any(isinstance(types[k][axis], Varying) for k in statement.args)
    ]
    said = [axis for axis in mesh.axes if isinstance(t[axis], Varying)]
    may = {*apart, *(a for k in statement.args for a in _outside(types[k], apart))}
    assert {*apart} <= {*said} <= may, (
        f"{statement.text} of Varying values on {apart} is said to be {t!r}"
    )
    apart = said
    spread = {
        k: regrouped(values[k], types[k], _with(types[k], apart)) for k in {*statement.args}
    }
    results: list[Tensor] = []
    for place in product(*(range(mesh.sizes[axis]) for axis in apart)):
        here = [spread[k][place] if k in spread else None for k in range(len(values))]
        if ".unflatten(" in statement.text:  # sizes in the text are those of one rank
            results.append(_unflattened(here, t, statement))
        else:
            results.append(evaluate(statement.text, here, {}))
    sizes = [mesh.sizes[axis] for axis in apart]
    return torch.stack(results).reshape((*sizes, *results[0].shape))


def _unflattened(values: Sequence[Any], t: TensorType, statement: Statement) -> Tensor:
    value = values[statement.args[0]]
    dim = int(statement.text.split("(")[1].split(",")[0])
    cuts = [t.cuts(d) for d in (dim, dim + 1)]
    if cuts[0]:
        return value.unflatten(dim, (cuts[0][0][1].total, -1))
    if cuts[1]:
        return value.unflatten(dim, (-1, cuts[1][0][1].total))
    return evaluate(statement.text, values, {})


def _on_ranks(
    program: Program, pieces: Sequence[Sequence[Tensor]], seeds: Sequence[Tensor]
) -> list[tuple[list[Tensor], list[Tensor | None]]]:
    """Return all values and the gradients, by rank; no gradients where torch has none."""
    mesh = program.mesh
    if not program.communicates:
        return [
            _on_rank(program, mesh.seen_from(place), [p[r] for p in pieces], seeds[r])
            for r, place in enumerate(mesh.coordinates())
        ]

    def on_this_rank() -> tuple[list[Tensor], list[Tensor | None]]:
        r = dist.get_rank()
        return _on_rank(program, device_mesh(), [p[r] for p in pieces], seeds[r])

    return run_ranks(mesh.sizes, on_this_rank)


def _on_rank(
    program: Program, mesh: Any, held: Sequence[Tensor], seed: Tensor
) -> tuple[list[Tensor], list[Tensor | None]]:
    inputs = [
        x.clone().requires_grad_(given.kind == FLOAT)
        for x, given in zip(held, program.inputs, strict=True)
    ]
    with placements.set_current_mesh(mesh), placements.typecheck():
        for x, given in zip(inputs, program.inputs, strict=True):
            placements.assert_type(x, dict(given.types))
        values: list[Tensor] = program.values(inputs, Ours.names)
    held_values = [value.detach() for value in values]
    if not values[-1].requires_grad or values[-1].shape != seed.shape:
        return held_values, []
    try:
        return held_values, gradients([values[-1]], [seed], inputs)
    except RuntimeError as error:
        if "invalid gradient" not in str(error):  # torch has no derivative for it
            raise
        return held_values, []
