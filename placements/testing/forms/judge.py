"""Judges a form: the line on one device against the same line on every rank.

What a type means is `split` and `join`. What the line means is what it does on one device
with the global values, where a size that is read from an operand is the global size. On
axes where an operand is Varying, or where the line asks for the rank, the line has such a
meaning at each place.
"""

import linecache
import math
import random
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from placements.runtime.errors import PlacementError
from placements.testing.forms.form import Form, Judgement
from placements.testing.forms.operands import (
    FormOperand,
    Place,
    dual_types,
    join_value,
    on,
    place_value,
    places,
    varying,
)
from placements.testing.forms.rounding import magnitudes, same, show
from placements.testing.forms.runs import (
    Run,
    Runner,
    counted_apart,
    is_undetermined,
    run_on_one_device,
    run_on_ranks,
    settings_of_pieces,
    source_of,
)
from placements.types.axis import AxisType, P, Shard, V


class False_(Exception):  # noqa: N801, N818
    """What was accepted is not true."""


def judge(form: Form, rng: random.Random, run: Runner = run_on_ranks) -> Judgement:
    """Try a form; `run` is what runs it on the ranks."""
    source = source_of(form)
    try:
        code = compile(source, "<form>", "exec")
    except SyntaxError:
        return Judgement("invalid", "syntax")
    # So that errors find the names in the line, as they do in a file.
    linecache.cache["<form>"] = len(source), None, source.splitlines(True), "<form>"
    meant = run_on_one_device(form, code)
    if meant is None or is_undetermined(form, meant):
        return Judgement("invalid", "one device")
    ranks = run(form, code)
    if ranks is None:
        return Judgement("invalid", "undeclarable")
    errors = [r.error for r in ranks.values() if r.error is not None]
    for error in errors:
        if "can't allocate memory" in str(error):  # all ranks are in one process
            return Judgement("invalid", "memory")
        if not isinstance(error, PlacementError):
            return Judgement(_whose(error), f"{type(error).__name__}: {_first_line(error)}")
    if not errors and form.never:
        return Judgement("false", f"accepted, but {form.never}")
    if errors:
        said = _first_line(errors[0])
        if not _agree_to_refuse(form, ranks):
            return Judgement("disagree", f"some ranks refuse: {said}")
        nameless = re.search(r"\bargument \d", str(errors[0]))
        return Judgement("nameless" if nameless else "refused", said)
    try:
        if _judge_types(meant, ranks):
            for k in range(min(len(each.outputs) for each in ranks.values())):
                _judge_values(form, meant, ranks, k)
            _judge_gradients(form, meant, ranks, rng)
    except _Disagree as error:
        return Judgement("disagree", str(error))
    except False_ as error:
        return Judgement("false", str(error))
    found = next(iter(ranks.values())).types
    claims = not any(t is V for types in found if types for t in types.values())
    return Judgement("accepted", " ".join(map(str, found)), claims)


def _agree_to_refuse(form: Form, ranks: Mapping[Place, Run]) -> bool:
    """Return whether ranks that know the same sizes refuse, or all accept.

    The sizes of a Varying operand are known to its rank alone, so the line fails with a
    clear error where they do not fit. Torch itself fails on pieces without rows, where it
    fails at all.
    """
    known = form.sized_apart
    accepted = {on(rank, known) for rank, run in ranks.items() if run.error is None}
    refused = {
        on(rank, known)
        for rank, run in ranks.items()
        if run.error is not None
        and "torch does not take these pieces" not in str(run.error)
    }
    return not refused & accepted


def _first_line(error: Exception | None) -> str:
    return str(error).partition("\n")[0][:200]


def _whose(error: Exception) -> str:
    """Return whether an exception was raised inside the checker, or by torch's own op."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    inside = "placements" in Path(last.filename).parts
    # Torch has no frames of its own: the last one is the checker's that calls the op.
    calls_torch = isinstance(error, RuntimeError | IndexError) and "*args" in (
        last.line or ""
    )
    return "crash" if inside and not calls_torch else "torch"


class _Disagree(Exception):  # noqa: N818
    pass


def _judge_types(meant: Mapping[Place, Run], ranks: Mapping[Place, Run]) -> bool:
    """Raise if ranks that share a tensor disagree; return whether all ranks agree.

    Along an axis where an operand is Varying each rank has a tensor of its own, with sizes
    of its own, so extents may differ there; then there is no one type to join by.
    """
    for k, found in enumerate(next(iter(ranks.values())).types):
        if found is None:
            raise False_(f"output {k} has no type")
    for rank, run in ranks.items():
        for there, alone in meant.items():
            if _agree(rank, there) and len(run.outputs) != len(alone.outputs):
                raise _Disagree(
                    f"{len(run.outputs)} outputs, {len(alone.outputs)} on one device"
                )
    said: list[Any] = []
    for there in meant:
        first, *others = (run for rank, run in ranks.items() if _agree(rank, there))
        for other in others:
            for mine, theirs in zip(first.types, other.types, strict=False):
                if mine is None or theirs is None:
                    raise _Disagree("a rank infers no type")
                if list(mine.items()) != list(theirs.items()):
                    raise _Disagree(f"ranks infer {mine} and {theirs}")
        said.append([list(mine.items()) for mine in first.types if mine is not None])
    for axis in counted_apart(meant):
        for run in ranks.values():
            if any(types is not None and types[axis] is not V for types in run.types):
                raise False_(f"ranks of {axis!r} have other numbers of results")
    return all(types == said[0] for types in said)


def _judge_values(
    form: Form, meant: Mapping[Place, Run], ranks: Mapping[Place, Run], k: int
) -> None:
    said = _types(ranks, k)
    held = {rank: run.outputs[k].detach() for rank, run in ranks.items()}
    text = f"output {k} is said to be {said}"
    try:
        joined = join_value(held, said, form.sizes)
    except (ValueError, RuntimeError, IndexError) as error:
        raise False_(f"{text}, but {_first_line(error)}") from None
    if any(run.draws for run in meant.values()):
        if any(t is P for t in said.values()) and "empty" not in form.op:
            raise False_(f"{text}, but it was drawn by each rank")
        for axis in form.rank_axes:
            if said[axis] is V or "empty" in form.op:
                continue
            if _differ_along(axis, meant, k):
                raise False_(f"{text}, but each rank of {axis!r} draws in another way")
        for axis in settings_of_pieces(form):
            if said[axis] is not V and "empty" not in form.op:
                raise False_(f"{text}, but the size of a piece on {axis!r} sets the draw")
        if _free(form, said):
            return
        for where, value in joined.items():
            for there, run in meant.items():
                if _agree(where, there) and run.outputs[k].shape != value.shape:
                    raise False_(
                        f"{text}: shape {list(value.shape)}, on one device "
                        f"{list(run.outputs[k].shape)}"
                    )
        return
    if _free(form, said):
        return
    summed = magnitudes(held, said, form.sizes)
    for where, value in joined.items():
        for there, run in meant.items():
            if not _agree(where, there):
                continue
            if k >= len(run.outputs):
                raise False_(f"{text}, but there are {len(run.outputs)} on one device")
            if not same(value, run.outputs[k].detach(), summed.get(where)):
                raise False_(
                    f"{text}: joined {show(value)}, on one device {show(run.outputs[k])}"
                )


def _differ_along(axis: str, meant: Mapping[Place, Run], k: int) -> bool:
    """Return whether ranks of an axis get different numbers of the same generator."""
    firsts: dict[Place, Tensor] = {}
    for where, run in meant.items():
        rest = tuple(at for at in where if at[0] != axis)
        found = run.outputs[k].detach()
        if not same(found, firsts.setdefault(rest, found)):
            return True
    return False


def _types(ranks: Mapping[Place, Run], k: int) -> dict[str, AxisType]:
    said = next(iter(ranks.values())).types[k]
    assert said is not None
    return said


def _free(form: Form, said: Mapping[str, AxisType]) -> bool:
    """Return whether a Varying result was made of pieces or summands: it claims nothing."""
    pieces = {
        axis
        for x in form.operands.values()
        for axis, t in x.types.items()
        if t is P or isinstance(t, Shard)
    }
    return any(axis in pieces for axis in varying(said))


def _agree(one: Place, other: Place) -> bool:
    there = dict(other)
    return all(there.get(axis, at) == at for axis, at in one)


def _judge_gradients(
    form: Form, meant: Mapping[Place, Run], ranks: Mapping[Place, Run], rng: random.Random
) -> None:
    """The gradients of one output, drawn at random, with a cotangent of the dual type."""
    if any(run.draws for run in meant.values()):
        return
    k = rng.randrange(min(len(each.outputs) for each in ranks.values()))
    said = _types(ranks, k)
    if _free(form, said) or not all(run.has_gradient(k) for run in meant.values()):
        return
    apart = form.apart
    shape = {
        where: _shape_at(meant, where, k) for where in places(form.sizes, varying(said))
    }
    dtype = next(iter(meant.values())).outputs[k].dtype
    cotangents = {
        where: torch.tensor(
            [rng.randint(-2, 3) for _ in range(math.prod(s))], dtype=dtype
        ).reshape(s)
        for where, s in shape.items()
    }
    local = place_value(cotangents, dual_types(said), form.sizes, rng)
    try:
        gradients = {
            where: {
                there: _gradients(run, k, cotangents[on(where, varying(said))])
                for there, run in meant.items()
                if _agree(where, there)
            }
            for where in places(form.sizes, list({*apart, *varying(said)}))
        }
    except RuntimeError:
        return  # one device has no gradient either
    try:
        held = {rank: _gradients(run, k, local[rank]) for rank, run in ranks.items()}
    except RuntimeError as error:
        raise False_(f"backward fails on a rank: {_first_line(error)}") from None
    for x in form.operands.values():
        if x.name in next(iter(ranks.values())).leaves:
            own = {rank: found[x.name] for rank, found in held.items()}
            _judge_gradient(form, x, said, gradients, own, dtype)


def _shape_at(meant: Mapping[Place, Run], where: Place, k: int) -> list[int]:
    return next(list(r.outputs[k].shape) for p, r in meant.items() if _agree(where, p))


def _judge_gradient(
    form: Form,
    x: FormOperand,
    said: Mapping[str, AxisType],
    gradients: Mapping[Place, Mapping[Place, Mapping[str, Tensor]]],
    held: Mapping[Place, Tensor],
    dtype: torch.dtype,
) -> None:
    own = varying(x.types)
    once = [axis for axis in form.apart if axis not in varying(said) and axis not in own]
    types = dual_types(x.types)
    text = f"the gradient of {x.name}"
    try:
        joined = join_value(held, types, form.sizes)
    except (ValueError, RuntimeError) as error:
        raise False_(f"{text} is {types} by its type, but {_first_line(error)}") from None
    summed = magnitudes(held, types, form.sizes)
    for where, value in joined.items():
        expected = torch.zeros_like(value)
        for place, by_place in gradients.items():
            if on(place, own) == where and all(at == 0 for _, at in on(place, once)):
                for each in by_place.values():
                    if each[x.name].shape != expected.shape:
                        raise False_(f"{text} has shape {list(expected.shape)}")
                    expected = expected + each[x.name]
        if not same(value, expected, summed.get(where), dtype):
            raise False_(f"{text}: joined {show(value)}, on one device {show(expected)}")


def _gradients(run: Run, k: int, cotangent: Tensor) -> dict[str, Tensor]:
    output, leaves = run.outputs[k], run.leaves
    found: list[Tensor | None] = [None] * len(leaves)
    if output.requires_grad and leaves:
        found = list(
            torch.autograd.grad(
                output, list(leaves.values()), cotangent,
                retain_graph=True, allow_unused=True,
            )
        )  # fmt: skip
    return {
        name: torch.zeros_like(leaf) if grad is None else grad.to_dense()
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }
