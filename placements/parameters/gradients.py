"""Reduce gradients as the types of their parameters say: the sums that are still due.

The gradient of a parameter has the dual of its type. Where that is Partial, and only
there, the ranks hold summands. Sums, never averages: what a loss divides by is part of
the loss (`global_mean`), so that gradients do not depend on how ranks are split.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from placements._torch import unseen
from placements.collectives.moves import Move
from placements.collectives.precision import Dtypes, gradient_dtype, said_dtypes
from placements.inference.presentations import presented
from placements.inference.terms import Refusal
from placements.inference.transitions import find
from placements.parameters.held import (
    Held,
    Meshes,
    frozen_parameters,
    meshes_or_current,
    ranks_of,
    trained_parameters,
)
from placements.parameters.stale import refuse_waiting
from placements.runtime import tags
from placements.runtime.callsite import caller
from placements.runtime.dtensors import axes_with, local_part
from placements.runtime.errors import PlacementError, mismatch, refused
from placements.runtime.gradient_notes import Note, Step, note_of, put_note, reduced
from placements.runtime.gradient_watch import (
    check_noted,
    in_trouble,
    misfit,
    settle,
    watch,
    watch_noted,
)
from placements.runtime.ledger import active_ledger
from placements.runtime.state import observer, suspended
from placements.types.axis import AxisType, P, R, V
from placements.types.tensor import TensorType

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
    the axis, else in the `reduce_dtype` of FSDP2, else in that of the gradient. The
    gradient keeps its own.
    Communicates: all-reduce over each Partial axis, gradients in buckets.
    A gradient that typed collectives reduced already, in a hook or by an assignment to
    `.grad`, is summed over the axes that are left.
    Raises PlacementError for a parameter without a declared type, for a gradient that
    this function reduced before (a second sum would count it n times), and for one of
    which it is not known whether it was reduced.
    """
    call, watcher = "reduce_gradients", observer()
    with unseen(), suspended(), torch.no_grad():
        # All that can be refused is refused before the first sum, and what is summed is
        # marked at once: whoever calls again after an error sums nothing twice.
        due = list(_due(call, module, meshes, op_dtype))
        refuse_frozen(call, module, meshes)
        for bucket in _buckets(due):
            _reduce(bucket)
            for one in bucket:
                grad = one.held.tensor.grad
                if grad is None:
                    continue
                _mark(one, grad)
                if watcher is not None:
                    watcher.crossing(call, one.held.name, *_claimed(grad, one.after))


def _claimed(grad: Tensor, found: TensorType) -> tuple[Tensor, TensorType]:
    """Return what this rank holds, and what can be said of it: shards have other sizes."""
    local = local_part(grad)[0]
    if local is not grad:
        found = _with(found, {a: V for a, t in found.items() if t.letter == "S"})
    return local, found


def gradient_axes(
    module: nn.Module, *, meshes: Meshes = None
) -> dict[str, tuple[str, ...]]:
    """Parameter name -> the mesh axes over which its gradient must be summed.

    For those who reduce by other means. For FSDP2 `placements.fully_shard` reads the same
    types. By hand it takes a mesh of these axes for each parameter, or of those among them
    that are to be sharded over, and two more calls, since FSDP2 averages unless told
    otherwise, and gloo does not scale: `block.set_gradient_divide_factor(1.0)`,
    `block.set_force_sum_reduction_for_comms(True)`.
    """
    known = meshes_or_current("gradient_axes", meshes)
    held = trained_parameters("gradient_axes", module, known)
    return {one.name: partial_axes(one.type.dual()) for one in held}


def partial_axes(tensor_type: TensorType) -> tuple[str, ...]:
    return tuple(axis for axis in tensor_type.mesh.axes if tensor_type[axis].letter == "P")


def gradient_type(held: Held, call: str) -> TensorType:
    """Return the type of a parameter's gradient as it is now; the dual until it is reduced.

    Raises PlacementError if it was reduced by other means and is not what it should be,
    or if it is not known what it is.
    """
    grad = held.tensor.grad
    assert grad is not None
    settle(held.tensor)
    wanted, note = held.type.dual(), note_of(grad)
    if note is not None and note.trouble:
        raise in_trouble(call, held.name, note)
    handled = handled_axes(call, held, grad)
    pending = [axis for axis, t in handled.items() if t == P]
    if pending:
        raise _partial_dtensor(call, held.name, pending[0])
    # What a DTensor says of itself holds, whatever is known of the rest.
    wanted = _with(wanted, handled)
    try:
        found = _with(_found(wanted, tags.get(grad), note), handled)
    except Refusal as refusal:
        raise misfit(call, held.name, refusal) from None
    for axis, t in wanted.items():
        if found[axis] != t and (t.letter, found[axis].letter) not in _REDUCTIONS:
            raise mismatch(
                call, f"the gradient of {held.name!r}", axis, repr(t), repr(found[axis]),
                rule="the gradient of a parameter has the dual of its type, or is "
                "Replicate where it was Partial and is reduced",
            )  # fmt: skip
    check_noted(call, held.name, wanted, found, note)
    return found


def handled_axes(call: str, held: Held, tensor: Tensor) -> dict[str, AxisType]:
    """Return the types of a parameter or gradient on the axes that a DTensor handles.

    Raises PlacementError if ranks with other values share it, or FSDP2 holds it back.
    """
    refuse_waiting(call, held)
    try:
        handled = local_part(tensor, held.type.mesh)[1]
    except ValueError as error:
        raise refused(
            call, f"{held.name!r} is {error}", name=held.name, rule=_SHARDED, advice=_CALL
        ) from None
    ranks = tags.summed_ranks(held.tensor)
    if ranks is not None and held.type.mesh.device_mesh is not None:  # by DDP
        handled |= dict.fromkeys(axes_with(held.type.mesh, ranks) or (), R)
    for axis, t in handled.items():
        said = held.type[axis] if axis in held.type else R
        if t.letter == "S" and said != R:
            raise refused(
                call,
                f"{held.name!r} is sharded by other means over axis {axis!r}, on which it "
                f"is {said!r}, expected Replicate",
                name=held.name, axis=axis, expected="Replicate", actual=repr(said),
                rule=_SHARDED, advice=_CALL,
            )  # fmt: skip
    # A shard is the rank's own: no type of a tensor knows how others cut it.
    return {axis: V if t.letter == "S" else t for axis, t in handled.items()}


_SHARDED = (
    "only ranks that hold the same parameter, and summands of its gradient, can hold a "
    "shard each"
)
_CALL = "placements.fully_shard(module, meshes=...) reads the ranks from the types"

# (what the gradient was, what it may be): a sum that is done gives R, or I, which is equal
# on all ranks too.
_REDUCTIONS = {("P", "R"), ("P", "I")}


def _found(wanted: TensorType, known: TensorType | None, note: Note | None) -> TensorType:
    """Return the type that the tensor has on the parameter's mesh; else what is noted."""
    if known is None or known.fresh is not None:
        return reduced(wanted, note)
    return presented(known, wanted.mesh)


def _with(known: TensorType, types: Mapping[str, AxisType]) -> TensorType:
    """Return the same type, but for the axes that are given."""
    if not any(axis in known for axis in types):
        return known
    found = tuple(types.get(axis, known[axis]) for axis in known.mesh.axes)
    return TensorType(known.mesh, found, known.orders)


def _partial_dtensor(call: str, name: str, axis: str) -> PlacementError:
    return refused(
        call, f"the gradient of {name!r} is a DTensor that is Partial on axis {axis!r}",
        name=name, axis=axis, expected="Replicate or Shard", actual="Partial",
        rule="a sum that DTensor has put off is DTensor's to do: its placements would "
        "still say Partial after another",
        advice="p.grad = p.grad.redistribute(placements=p.placements) before this call",
    )  # fmt: skip


def refuse_frozen(call: str, module: nn.Module, meshes: Meshes) -> None:
    """Raise if a parameter that is not trained holds a gradient that is not reduced.

    An optimizer would step by it, but ranks may differ in whether there is one, so it
    cannot be reduced with the others.
    """
    for held in frozen_parameters(call, module, meshes_or_current(call, meshes)):
        pending = partial_axes(gradient_type(held, call))
        if pending:
            raise mismatch(
                call, f"the gradient of {held.name!r}, which is not trained", pending[0],
                "Replicate", "Partial",
                rule="an optimizer would step by this rank's summand of the gradient",
                advice=f"drop it ({held.name}.grad = None), or freeze the parameter after "
                "the step: requires_grad_(False)",
            )  # fmt: skip


class Due(NamedTuple):
    """A gradient that needs a sum, as it was found before any was done."""

    held: Held
    axes: tuple[str, ...]
    after: TensorType  # what the gradient is when it is summed
    note: Note | None  # what others have done
    dtype: torch.dtype  # in which all ranks send it, those without a gradient too
    op_dtypes: tuple[torch.dtype, ...]  # in which it is summed over each axis

    @property
    def kind(self) -> tuple[Any, ...]:
        """What gradients must have in common to be sent together."""
        where = self.held.type.mesh, self.held.tensor.device
        return *where, self.axes, self.dtype, self.op_dtypes


def _due(
    call: str, module: nn.Module, meshes: Meshes, op_dtype: torch.dtype | None
) -> Iterator[Due]:
    """Yield the gradients that need a sum; the same on every rank.

    A gradient that hooks or assignments have reduced is left as it is.
    """
    for held in trained_parameters(call, module, meshes_or_current(call, meshes)):
        handled = handled_axes(call, held, held.tensor)
        found, note = _with(held.type.dual(), handled), None
        axes = partial_axes(found)
        grad = held.tensor.grad
        if grad is not None:
            found, note = gradient_type(held, call), note_of(grad)
            if axes and note is not None and note.by_us:
                raise _reduced_already(call, held, axes[0])
            axes = tuple(axis for axis in axes if found[axis] == P)
            watch_noted(held.tensor)
        if axes:
            dtype = _wire_dtype(call, held)
            said = _op_dtypes(call, dtype, axes, op_dtype, tags.reduce_dtype(held.tensor))
            if grad is not None:
                own_memory(call, held)
            after = _with(found, dict.fromkeys(axes, R))
            yield Due(held, axes, after, note, dtype, said)


def _op_dtypes(
    call: str,
    dtype: torch.dtype,
    axes: Iterable[str],
    op_dtype: torch.dtype | None,
    of_fsdp: torch.dtype | None,
) -> tuple[torch.dtype, ...]:
    """Return the dtype to sum in over each axis: by default no narrower than the input."""
    found: list[torch.dtype] = []
    widest = dtype
    for axis in axes:
        by_policy = gradient_dtype(axis) if dtype.is_floating_point else None
        found.append(op_dtype or by_policy or of_fsdp or widest)
        said_dtypes(call, dtype, found[-1])
        widest = torch.promote_types(widest, found[-1])
    return tuple(found)


def _wire_dtype(call: str, held: Held) -> torch.dtype:
    """Return the dtype in which all ranks send a gradient, also a rank that has none."""
    parameter, grad = held.tensor, held.tensor.grad
    if parameter.grad_dtype is not None:
        return parameter.grad_dtype
    # The gradient may be of any dtype; it is sent in one that all ranks know.
    wide = torch.promote_types(parameter.dtype, torch.float32)
    if grad is not None and torch.promote_types(grad.dtype, wide) != wide:
        raise refused(
            call,
            f"the gradient of {held.name!r} is {grad.dtype}, which {wide} cannot hold",
            name=held.name,
            rule="grad_dtype is None, so ranks without a gradient cannot know its dtype",
            advice=f"{held.name}.grad_dtype = {grad.dtype}",
        )
    return wide


def own_memory(call: str, held: Held) -> None:
    """Make sure that a gradient can be written in place: dense, no memory shared."""
    grad = held.tensor.grad
    assert grad is not None
    if grad.layout != torch.strided:
        raise refused(
            call,
            f"the gradient of {held.name!r} has the layout {grad.layout}, expected a dense "
            "tensor",
            name=held.name,
            expected=str(torch.strided),
            actual=str(grad.layout),
            advice="make it dense: nn.Embedding(..., sparse=False), or p.grad = "
            "p.grad.to_dense()",
        )
    local = local_part(grad)[0]
    sizes = zip(local.shape, local.stride(), strict=True)
    if local is grad and any(size > 1 and stride == 0 for size, stride in sizes):
        known, note = tags.get(grad), note_of(grad)
        held.tensor.grad = own = grad.clone(memory_format=torch.contiguous_format)
        if known is not None:
            tags.put(own, known)
        if note is not None:
            put_note(own, note)


def _reduced_already(call: str, held: Held, axis: str) -> PlacementError:
    return refused(
        call,
        f"the gradient of {held.name!r} was reduced already, so it is Replicate on axis "
        f"{axis!r}, expected Partial",
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
    by_kind: dict[tuple[Any, ...], list[Due]] = {}
    for one in due:
        by_kind.setdefault(one.kind, []).append(one)
    for run in by_kind.values():
        bucket: list[Due] = []
        size = 0
        for one in run:
            bucket.append(one)
            size += one.held.tensor.numel() * one.held.tensor.element_size()
            if size >= _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


def _reduce(bucket: list[Due]) -> None:
    # After the gradients, one number for each: on how many ranks there was one. A
    # gradient that is None on every rank stays None.
    first = bucket[0]
    like = [local_part(one.held.tensor)[0] for one in bucket]
    grads = [
        None if one.held.tensor.grad is None else local_part(one.held.tensor.grad)[0]
        for one in bucket
    ]
    present = torch.tensor([float(g is not None) for g in grads], dtype=first.dtype)
    flat = [
        (torch.zeros_like(part) if grad is None else grad).reshape(-1).to(first.dtype)
        for grad, part in zip(grads, like, strict=True)
    ]
    total = torch.cat([*flat, present.to(like[0].device)])
    mesh, site = first.held.type.mesh, caller()
    assert _SUM is not None
    for axis, op in zip(first.axes, first.op_dtypes, strict=True):
        # Between two sums nothing is rounded: the next axis has a dtype of its own.
        said = Dtypes(op, torch.promote_types(op, total.dtype))
        move = Move(
            _SUM, ranks_of(mesh, axis), dtypes=said, record=active_ledger(), site=site
        )
        total = move.run(total)
    sums = torch.split(total, [part.numel() for part in [*flat, present]])
    # Meta tensors have no values: there this rank answers for all.
    counts = present if total.is_meta else sums[-1]
    counted = cast(list[float], cast(Any, counts.abs()).tolist())
    for one, grad, part, value, count in zip(
        bucket, grads, like, sums[:-1], counted, strict=True
    ):
        if grad is not None:
            grad.copy_(value.view_as(grad))
        elif count > 0:
            _give(one.held.tensor, value.view_as(part).to(first.dtype, copy=True))


def _give(parameter: Tensor, grad: Tensor) -> None:
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is not None:
        from torch.distributed.tensor import DTensor  # only where it is in use

        whole: Any = parameter
        grad = DTensor.from_local(
            grad, mesh, whole.placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
    parameter.grad = grad


def _mark(one: Due, grad: Tensor) -> None:
    """Note on the gradient that it is reduced, and watch what backward adds from now on."""
    mesh, earlier = one.held.type.mesh, one.note or Note()
    steps = tuple(Step("reduce_gradients", mesh, axis, P, R, "") for axis in one.axes)
    put_note(grad, Note((*earlier.steps, *steps), by_us=True))
    if getattr(grad, "device_mesh", None) is None:  # a DTensor has no type in a block
        tags.put(grad, one.after)
    watch(one.held.tensor).mark(grad)
