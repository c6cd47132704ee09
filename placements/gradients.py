"""Reduce gradients as the types of their parameters say: the sums that are still due.

The gradient of a parameter has the dual of its type. Where that is Partial, and only
there, the ranks hold summands. Sums, never averages: what a loss divides by is part of
the loss (`global_mean`), so that gradients do not depend on how ranks are split.
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from placements import tags
from placements.callsite import caller
from placements.errors import PlacementError, mismatch
from placements.ledger import active_ledger
from placements.mesh import Mesh
from placements.moves import Move
from placements.parameters import (
    Held,
    Meshes,
    line_of,
    local_part,
    meshes_or_current,
    trained_parameters,
)
from placements.precision import gradient_dtype, said_dtypes
from placements.state import observer, suspended
from placements.tensor_type import TensorType
from placements.torch_private import on_accumulation, unseen
from placements.transitions import find
from placements.types import P, R

# States of a gradient, kept on it: a sum that was done must not be done again.
REDUCED, ADDED_TO = "reduced", "added to"

# Gradients that are reduced over the same axes travel together, so many bytes at a time.
_BUCKET_BYTES = 2**25

_SUM = find("all_reduce", P, R)


def reduce_gradients(
    module: nn.Module, *, meshes: Meshes = None, op_dtype: torch.dtype | None = None
) -> None:
    """Gradients, Partial -> Replicate, in place: each is summed over its Partial axes.

    Call it once after the last backward of a step. A rank on which a parameter has no
    gradient contributes zeros and gets the sum. Parameters that live on other meshes over
    the same ranks are found through `meshes`: `meshes=(dense, sparse)`.
    Sums are done in `op_dtype`; without it in the dtype that `set_gradient_dtype` gives
    the axis, else in that of the gradient. The gradient keeps its own.
    Communicates: all-reduce over each Partial axis, gradients in buckets.
    Raises PlacementError for a parameter without a declared type, and for a gradient that
    was reduced before: it is Replicate, and a second sum would count it n times.
    """
    watcher = observer()
    with unseen(), suspended(), torch.no_grad():
        due = list(_due("reduce_gradients", module, meshes))
        for bucket in _buckets(due):
            _reduce(bucket, op_dtype)
        for held, axes in due:
            if held.tensor.grad is not None:
                _mark(held, axes)
                if watcher is not None:
                    found = gradient_type(held)
                    watcher.crossing("reduce_gradients", held.name, held.tensor.grad, found)


def gradient_axes(
    module: nn.Module, *, meshes: Meshes = None
) -> dict[str, tuple[str, ...]]:
    """Parameter name -> the mesh axes over which its gradient must be summed.

    For those who reduce by other means. FSDP2 averages unless told otherwise:
    `fully_shard(block, mesh=device_mesh[axes])`, `block.set_gradient_divide_factor(1.0)`.
    """
    known = meshes_or_current("gradient_axes", meshes)
    held = trained_parameters("gradient_axes", module, known)
    return {one.name: partial_axes(one.type.dual()) for one in held}


def partial_axes(tensor_type: TensorType) -> tuple[str, ...]:
    return tuple(axis for axis in tensor_type.mesh.axes if tensor_type[axis].letter == "P")


def gradient_type(held: Held) -> TensorType:
    """The type of a parameter's gradient as it is now; the dual until it is reduced."""
    grad = held.tensor.grad
    assert grad is not None
    if tags.gradient_state(grad) == ADDED_TO:
        raise _added_to("the gradient", held)
    wanted, found = held.type.dual(), tags.get(grad)
    if found is None or found.fresh is not None or found.mesh != held.type.mesh:
        found = wanted
    for axis, t in wanted.items():
        if found[axis] != t and (t, found[axis]) != (P, R):
            raise mismatch(
                "the gradient", f"the gradient of {held.name!r}", axis, repr(t),
                repr(found[axis]), rule="the gradient of a parameter has the dual of its "
                "type, or is Replicate where it was Partial and is reduced",
            )  # fmt: skip
    for axis, t in local_part(grad)[1].items():
        if axis in found:
            found = TensorType(
                found.mesh,
                tuple(
                    t if a == axis else old
                    for a, old in zip(found.mesh.axes, found.types, strict=True)
                ),
            )
    return found


Due = tuple[Held, tuple[str, ...]]


def _due(call: str, module: nn.Module, meshes: Meshes) -> Iterator[Due]:
    """Parameters whose gradients need a sum, with the axes; the same on every rank."""
    for held in trained_parameters(call, module, meshes_or_current(call, meshes)):
        done: dict[str, object] = dict(local_part(held.tensor)[1])
        axes = tuple(a for a in partial_axes(held.type.dual()) if a not in done)
        grad = held.tensor.grad
        state = None if grad is None else tags.gradient_state(grad)
        if not axes:
            continue
        if state == ADDED_TO:
            raise _added_to(call, held)
        actual = held.type.dual() if grad is None else gradient_type(held)
        done_on = axes if state == REDUCED else [a for a in axes if actual[a] == R]
        if done_on:
            raise PlacementError(
                f"{call}: the gradient of {held.name!r} was reduced already, so it is "
                f"Replicate on axis {done_on[0]!r}, expected Partial",
                where=call,
                name=held.name,
                axis=done_on[0],
                expected="Partial",
                actual="Replicate",
                rule="a second sum would count the gradient once for every rank",
                advice="call it once, after the last backward of the step; zero_grad() "
                "before the next step's first",
            )
        yield held, axes


def _added_to(call: str, held: Held) -> PlacementError:
    return PlacementError(
        f"{call}: backward added to the gradient of {held.name!r} after it was reduced",
        where=call,
        name=held.name,
        expected="Partial",
        actual="Replicate plus Partial",
        rule="a sum over ranks that is done and one that is due are no longer told apart",
        advice="reduce once, after the last backward; start the next step with "
        "zero_grad(), which drops gradients (set_to_none=True)",
    )


def _buckets(due: Iterable[Due]) -> Iterator[list[Due]]:
    """Runs of gradients of one kind; the same on every rank."""
    by_kind: dict[tuple[Mesh, tuple[str, ...], torch.dtype, torch.device], list[Due]] = {}
    for held, axes in due:
        kind = (held.type.mesh, axes, _dtype_of_gradient(held.tensor), held.tensor.device)
        by_kind.setdefault(kind, []).append((held, axes))
    for run in by_kind.values():
        bucket: list[Due] = []
        size = 0
        for one in run:
            bucket.append(one)
            size += one[0].tensor.numel() * one[0].tensor.element_size()
            if size >= _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


def _dtype_of_gradient(parameter: Tensor) -> torch.dtype:
    """Known without a gradient too: other ranks may have one where this has none."""
    return parameter.grad_dtype or parameter.dtype


def _reduce(bucket: list[Due], op_dtype: torch.dtype | None) -> None:
    # After the gradients, one number for each: on how many ranks there was one. A
    # gradient that is None on every rank stays None.
    like = [local_part(held.tensor)[0] for held, _ in bucket]
    grads = [
        None if held.tensor.grad is None else local_part(held.tensor.grad)[0]
        for held, _ in bucket
    ]
    dtype = _dtype_of_gradient(bucket[0][0].tensor)
    present = torch.tensor([float(grad is not None) for grad in grads], dtype=dtype)
    flat = [
        (torch.zeros_like(part, dtype=dtype) if grad is None else grad).reshape(-1)
        for grad, part in zip(grads, like, strict=True)
    ]
    total = torch.cat([*flat, present.to(like[0].device)])
    (held, axes), site = bucket[0], caller()
    assert _SUM is not None
    for axis in axes:
        line = line_of(held.type.mesh, axis)
        by_policy = gradient_dtype(axis) if total.is_floating_point() else None
        said = said_dtypes("reduce_gradients", dtype, op_dtype or by_policy)
        total = Move(_SUM, line, dtypes=said, record=active_ledger(), site=site).run(total)
    sums = torch.split(total, [part.numel() for part in [*flat, present]])
    # Meta tensors have no values: there this rank answers for all.
    counts = cast(list[float], cast(Any, present if total.is_meta else sums[-1]).tolist())
    for (held, _), grad, part, value, count in zip(
        bucket, grads, like, sums[:-1], counts, strict=True
    ):
        if grad is not None:
            grad.copy_(value.view_as(grad))
        elif count > 0:
            _give(held.tensor, value.view_as(part).to(dtype, copy=True))


def _give(parameter: Tensor, grad: Tensor) -> None:
    if local_part(parameter)[1]:
        raise PlacementError(
            "reduce_gradients: FSDP2 left a parameter without a gradient on one rank only",
            where="reduce_gradients",
        )
    parameter.grad = grad


def _mark(held: Held, axes: tuple[str, ...]) -> None:
    """Note on the gradient that it is reduced; from now on watch for what is added."""
    parameter = held.tensor
    assert parameter.grad is not None
    dual = held.type.dual()
    types = tuple(
        R if axis in axes else t for axis, t in zip(dual.mesh.axes, dual.types, strict=True)
    )
    tags.put(parameter.grad, TensorType(dual.mesh, types, dual.orders))
    tags.put_gradient_state(parameter.grad, REDUCED)

    def accumulated(parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is not None and tags.gradient_state(grad) == REDUCED:
            tags.put_gradient_state(grad, ADDED_TO)
        handle.remove()

    handle = on_accumulation(parameter, accumulated)
