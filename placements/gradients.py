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
from placements.infer import Refusal
from placements.leaf_gradients import check_noted, in_trouble, misfit, watch
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
from placements.presentations import presented
from placements.reductions import Note, Step, note_of, put_note, reduced
from placements.state import observer, suspended
from placements.tensor_type import TensorType
from placements.torch_private import unseen
from placements.transitions import find
from placements.types import P, R

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
    A gradient that typed collectives reduced already, in a hook or by an assignment to
    `.grad`, is summed over the axes that are left.
    Raises PlacementError for a parameter without a declared type, for a gradient that
    this function reduced before (a second sum would count it n times), and for one of
    which it is not known whether it was reduced.
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


def gradient_type(held: Held, call: str = "the gradient") -> TensorType:
    """The type of a parameter's gradient as it is now; the dual until it is reduced.

    Raises PlacementError if it was reduced by other means and is not what it should be,
    or if it is not known what it is.
    """
    grad = held.tensor.grad
    assert grad is not None
    wanted, name = held.type.dual(), f"the gradient of {held.name!r}"
    note = note_of(grad)
    if note is not None and note.trouble:
        raise in_trouble(call, held.name, note)
    try:
        found = _found(wanted, tags.get(grad), note)
    except Refusal as refusal:
        raise misfit(call, held.name, refusal) from None
    for axis, t in wanted.items():
        if found[axis] != t and (t.letter, found[axis].letter) not in _REDUCTIONS:
            raise mismatch(
                call, name, axis, repr(t), repr(found[axis]),
                rule="the gradient of a parameter has the dual of its type, or is "
                "Replicate where it was Partial and is reduced",
            )  # fmt: skip
    check_noted(call, held.name, wanted, found, note)
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


# (what the gradient was, what it may be): a sum that is done gives R, or I, which is equal
# on all ranks too.
_REDUCTIONS = {("P", "R"), ("P", "I")}


def _found(wanted: TensorType, known: TensorType | None, note: Note | None) -> TensorType:
    """The type that the tensor has, on the mesh of the parameter; else what is noted."""
    if known is None or known.fresh is not None:
        return reduced(wanted, note)
    return presented(known, wanted.mesh)


Due = tuple[Held, tuple[str, ...]]


def _due(call: str, module: nn.Module, meshes: Meshes) -> Iterator[Due]:
    """Parameters whose gradients need a sum, with the axes; the same on every rank.

    What hooks or assignments have reduced is left as it is.
    """
    for held in trained_parameters(call, module, meshes_or_current(call, meshes)):
        done: dict[str, object] = dict(local_part(held.tensor)[1])
        axes = tuple(a for a in partial_axes(held.type.dual()) if a not in done)
        grad = held.tensor.grad
        if grad is not None:
            actual, note = gradient_type(held, call), note_of(grad)
            if axes and note is not None and note.by_us:
                raise _reduced_already(call, held, axes[0])
            axes = tuple(axis for axis in axes if actual[axis] == P)
        if axes:
            yield held, axes


def _reduced_already(call: str, held: Held, axis: str) -> PlacementError:
    return PlacementError(
        f"{call}: the gradient of {held.name!r} was reduced already, so it is "
        f"Replicate on axis {axis!r}, expected Partial",
        where=call,
        name=held.name,
        axis=axis,
        expected="Partial",
        actual="Replicate",
        rule="a second sum would count the gradient once for every rank",
        advice="call it once, after the last backward of the step; zero_grad() "
        "before the next step's first",
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
    grad = held.tensor.grad
    assert grad is not None
    before, mesh = gradient_type(held), held.type.mesh
    types = tuple(
        R if axis in axes else t for axis, t in zip(mesh.axes, before.types, strict=True)
    )
    steps = tuple(Step("reduce_gradients", mesh, axis, P, R, "") for axis in axes)
    earlier = note_of(grad) or Note()
    put_note(grad, Note((*earlier.steps * (not earlier.is_input), *steps), by_us=True))
    tags.put(grad, TensorType(mesh, types, held.type.orders))
    watch(held.tensor)
