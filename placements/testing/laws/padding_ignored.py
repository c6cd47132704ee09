"""Padding: whatever rows of padding hold, nothing that counts depends on it.

A call is drawn, and masks for dims of its operands. It runs twice under the checker, with
other contents in the rows of padding. If it is accepted, the results are the same but for
their rows of padding, and these hold what their type says they hold. Rows of padding that
may hold anything get no gradient; the other gradients are the same in both runs, whatever
gradient comes back for rows of padding that are known to hold a number.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from placements.annotations.declarations import type_of
from placements.checker.mode import typecheck
from placements.runtime.mesh import set_current_mesh
from placements.runtime.tags import put
from placements.testing.cases import Given, OpCall, calls
from placements.testing.compare.one_device import check_value
from placements.testing.draw.whole_numbers import nonzero_numbers, seeded
from placements.testing.laws.comparison import gradients_if_any, tensors_in
from placements.testing.laws.placed_calls import InvalidCallError, PlacedCall
from placements.testing.ranks.crashes import check_judged
from placements.testing.strategies import seeds
from placements.types.index import Index
from placements.types.mesh import Mesh
from placements.types.padding import Pads, Validity
from placements.types.tensor import TensorType

ALONE = Mesh({})


@dataclass(frozen=True)
class PaddedCall:
    """A call, and the rows of padding of its operands."""

    call: OpCall
    pads: Sequence[tuple[Pads, ...]]  # by operand
    seed: int

    def __repr__(self) -> str:
        operands = ", ".join(
            f"x{k}: {str(given.dtype)[6:]}{list(given.shape)} {list(map(str, pads))}"
            for k, (given, pads) in enumerate(
                zip(self.call.operands, self.pads, strict=True)
            )
        )
        return f"{self.call.text} where {operands}, seed {self.seed}"

    def mask(self, pads: Pads, shape: Sequence[int]) -> Tensor:
        """Return which elements of a tensor of that shape are valid."""
        sizes = [shape[dim] for dim in pads.dims]
        outer, inner = pads.validity.outer, pads.validity.inner
        count = torch.Size(sizes).numel() // (outer * inner)
        first = replace(pads.validity, outer=1, inner=1).first
        if first is None:
            generator = seeded(self.seed, "mask", pads.validity.name, count)
            rows = torch.randint(0, 2, (count,), generator=generator) == 1
        else:
            rows = torch.arange(count) < first
        rows = rows.repeat_interleave(inner).repeat(outer).reshape(sizes)
        order = sorted(range(len(sizes)), key=lambda k: pads.dims[k])
        whole = [shape[d] if d in pads.dims else 1 for d in range(len(shape))]
        return rows.permute(order).reshape(whole).expand(tuple(shape))

    def operands(self, content: int) -> list[Tensor]:
        """Return the operands with the `content`-th contents of rows of padding."""
        values, others = self._drawn(self.seed), self._drawn(self.seed + 1 + content)
        made: list[Tensor] = []
        for value, other, pads in zip(values, others, self.pads, strict=True):
            # What is known to be held is held where other rows of padding cross, too.
            for one in sorted(pads, key=lambda p: p.holds is not None):
                fill = other if one.holds is None else torch.full_like(value, one.holds)
                value = torch.where(self.mask(one, value.shape), value, fill)
            made.append(value)
        return made

    def _drawn(self, seed: int) -> list[Tensor]:
        plain = TensorType(ALONE, ())
        types = [[plain] for _ in self.call.operands]
        placed = PlacedCall(self.call, ALONE, types, seed, special=False, shared=())
        return [held[0] for held in placed.locals()]


@dataclass
class PaddedRun:
    """One run: inputs, results and their types."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    types: list[TensorType]


def check_padding(padded: PaddedCall) -> bool:
    """Return whether a call is accepted; AssertionError if rows of padding count."""
    try:
        runs = [_run(padded, content) for content in range(2)]
    except InvalidCallError:
        return False
    except Exception as error:
        check_judged(error, lambda: padded.call.run(*_inputs(padded, 0)))
        return False
    for k, t in enumerate(runs[0].types):
        _check_result(padded, k, t.pads, [run.outputs[k].detach() for run in runs])
    _check_gradients(padded, [_gradients(padded, run, n) for n, run in enumerate(runs)])
    return True


def _inputs(padded: PaddedCall, content: int) -> list[Tensor]:
    return [
        x.detach().clone().requires_grad_(given.has_gradient)
        for x, given in zip(padded.operands(content), padded.call.operands, strict=True)
    ]


def _run(padded: PaddedCall, content: int) -> PaddedRun:
    inputs = _inputs(padded, content)
    torch.default_generator.manual_seed(padded.seed)
    with set_current_mesh(ALONE), typecheck():
        for x, pads, given in zip(inputs, padded.pads, padded.call.operands, strict=True):
            index = Index(given.counts) if given.counts is not None else None
            put(x, TensorType(ALONE, (), pads=pads, index=index))
        outputs = tensors_in(padded.call.run(*inputs))
        types = [type_of(output) for output in outputs]
    found = [t for t in types if t is not None]
    assert len(found) == len(types), f"{padded!r}: a result without a type"
    return PaddedRun(inputs, outputs, found)


def _check_result(
    padded: PaddedCall, k: int, pads: Sequence[Pads], found: Sequence[Tensor]
) -> None:
    what = f"{padded!r}: result {k}, {list(map(str, pads))}"
    assert found[0].shape == found[1].shape, what
    valid = torch.ones(found[0].shape, dtype=torch.bool)
    for one in pads:
        mask = padded.mask(one, found[0].shape)
        valid &= mask
        for x in found if one.holds is not None else ():
            held = x[~mask]
            check_value(f"{what} hold it", held, torch.full_like(held, one.holds or 0))
    check_value(what, found[0][valid], found[1][valid])


def _gradients(padded: PaddedCall, run: PaddedRun, content: int) -> list[Tensor | None]:
    cotangents: list[Tensor] = []
    for k, (output, t) in enumerate(zip(run.outputs, run.types, strict=True)):
        drawn, other = (
            nonzero_numbers(output.shape, seeded(padded.seed, *parts))
            for parts in (("cotangent", k), ("other", k, content))
        )
        for one in t.pads:
            drawn = torch.where(padded.mask(one, output.shape), drawn, other)
        for one in t.pads:
            if one.holds is None:
                drawn = torch.where(padded.mask(one, output.shape), drawn, 0)
        cotangents.append(drawn.to(output.dtype))
    return gradients_if_any(run.outputs, cotangents, run.inputs)


def _check_gradients(padded: PaddedCall, found: Sequence[list[Tensor | None]]) -> None:
    for k, pads in enumerate(padded.pads):
        one, two = found[0][k], found[1][k]
        if one is None or two is None:
            continue
        # An infinite derivative times no gradient is no number, padding or not.
        compared = one.isfinite() & two.isfinite()
        open_rows = torch.zeros(one.shape, dtype=torch.bool)
        for p in pads:
            mask = padded.mask(p, one.shape)
            if p.holds is None:
                open_rows |= ~mask
            else:
                compared &= mask
        what = f"{padded!r}: gradient of x{k}"
        check_value(what, one[compared], two[compared])
        given = one[open_rows & one.isfinite()]
        check_value(f"{what} at rows of padding", given, torch.zeros_like(given))


@st.composite
def padded_calls(draw: st.DrawFn, *, name: str) -> PaddedCall:
    """Draw calls of one op in which dims of some operands have rows of padding."""
    call = draw(calls(name=name))
    likely = draw(st.integers(1, 2))
    pads = [draw(_pads(given, likely)) for given in call.operands]
    return PaddedCall(call, pads, draw(seeds()))


@st.composite
def _pads(draw: st.DrawFn, given: Given, likely: int) -> tuple[Pads, ...]:
    ndim = len(given.shape)
    count = draw(st.sampled_from([1, 1, 0, 2])) if ndim else 0
    found: dict[tuple[int, ...], Pads] = {}
    for _ in range(count):
        first = draw(st.integers(0, ndim - 1))
        last = min(first + draw(st.sampled_from([1, 1, 2])), ndim)
        dims = tuple(range(first, last))
        form = draw(st.sampled_from([likely, likely, likely, 3, "first"]))
        validity = Validity(form) if isinstance(form, int) else None
        if validity is None:
            rows = torch.Size(given.shape[first:last]).numel()
            validity = Validity.of_first(draw(st.integers(0, rows)))
        whole = not given.dtype.is_floating_point
        holds = [None, 0, *([1] if whole and count == 1 and given.below is None else [])]
        found[dims] = Pads(validity, dims, draw(st.sampled_from(holds)))
    return tuple(found.values())
