"""Transitions: the value stays what it was, and backward is the exact adjoint.

Every row of `transitions.TRANSITIONS` is run on simulated ranks. All of them are linear,
so with whole numbers the dot products of both sides are equal to the last bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor

import placements
from placements.checker.mode import typecheck
from placements.collectives import all_to_all, all_to_all_start
from placements.inference.transitions import TRANSITIONS, Transition
from placements.runtime.mesh import set_current_mesh
from placements.testing.ranks.run import device_mesh, run_ranks
from placements.testing.strategies import extents, numbers, seeded, seeds
from placements.types.axis import BY_LETTER, AxisType, Shard
from placements.types.extents import Extent
from placements.types.meaning import put_pieces, take_piece

AXIS = "tp"


@dataclass(frozen=True)
class TransitionCase:
    """A transition on one axis of `ranks` ranks, and what to apply it to."""

    row: Transition
    ranks: int
    shape: tuple[int, ...]  # of the global value; without the dim of the ranks for V
    src: AxisType
    dst: AxisType
    seed: int
    contiguous: bool = True
    sends: tuple[tuple[int, ...], ...] = ()  # of an exchange, by rank
    apart: bool = False  # started, and waited for later


@st.composite
def transition_cases(draw: st.DrawFn, *, row: Transition) -> TransitionCase:
    """Draw cases of one row: all axis sizes, uneven and empty pieces, several runs."""
    if row not in TRANSITIONS:
        raise ValueError(f"{row} is not a row of the table of transitions")
    ranks = draw(st.integers(1, 4))
    size = st.sampled_from([1, 2, 3, 4, 0, 8])
    shape = list(draw(st.lists(size, min_size=1, max_size=3)))
    if row.action == "recut" and len(shape) < 2:
        shape.append(draw(st.integers(0, 4)))
    dims = list(draw(st.permutations(range(len(shape)))))
    src = _with_extent(draw, row.src, dims[0], shape, ranks)
    other = dims[1] if row.src == "S" == row.dst else dims[0]
    dst = _with_extent(draw, row.dst, other, shape, ranks)
    if row.call == "reinterpret" and row.src == "V" and row.dst == "S":
        dst = _with_extent(draw, "S", dims[0], shape, ranks)
    sends = ()
    if row.action == "exchange":
        count = st.integers(0, 2)
        sends = tuple(tuple(draw(count) for _ in range(ranks)) for _ in range(ranks))
    drawn = draw(seeds()), draw(st.booleans())
    apart = row.call == "all_to_all" and draw(st.booleans())
    return TransitionCase(row, ranks, tuple(shape), src, dst, *drawn, sends, apart)


def _with_extent(
    draw: st.DrawFn, letter: str, dim: int, shape: Sequence[int], ranks: int
) -> AxisType:
    if letter != "S":
        return BY_LETTER[letter]
    return Shard(dim, draw(extents(total=shape[dim], ranks=ranks)))


def check_transition(case: TransitionCase) -> None:
    """Run the case on simulated ranks; AssertionError if value or gradient is wrong."""
    generator = seeded(case.seed)
    held = [x.requires_grad_() for x in _locals(case, generator)]
    results = run_ranks({AXIS: case.ranks}, _one_rank, case, held)
    outputs = [y for y, _ in results]
    _check_values(case, [x.detach() for x in held], outputs)
    left = sum(float((y * _cotangent(case, r, y)).sum()) / _count(case.dst, case)
               for r, y in enumerate(outputs))  # fmt: skip
    right = sum(float((x.detach() * g).sum()) / _count(case.src, case)
                for x, (_, g) in zip(held, results, strict=True))  # fmt: skip
    assert left == right, f"{case}: <f(x), w> = {left}, <x, backward(w)> = {right}"


def _count(t: AxisType, case: TransitionCase) -> int:
    """Return how often ranks repeat a dot product: all do for an Invariant value."""
    return case.ranks if t.letter == "I" else 1


def _locals(case: TransitionCase, generator: torch.Generator) -> list[Tensor]:
    shape, action = list(case.shape), case.row.action
    if action in ("unbind", "sum and unbind"):
        shape.insert(0, case.ranks)
    if action == "exchange":
        return [numbers((sum(sizes), *shape[1:]), generator) for sizes in case.sends]
    if case.row.call == "reinterpret" and isinstance(case.dst, Shard):
        whole = numbers(shape, generator)
        return [_piece(whole, case.dst, r) for r in range(case.ranks)]
    if isinstance(case.src, Shard):
        whole = numbers(shape, generator)
        return [_piece(whole, case.src, r) for r in range(case.ranks)]
    if case.src.letter in "RI":
        whole = numbers(shape, generator)
        return [whole.clone() for _ in range(case.ranks)]
    return [numbers(shape, generator) for _ in range(case.ranks)]


def _piece(whole: Tensor, t: Shard, rank: int) -> Tensor:
    assert isinstance(t.extent, Extent)
    return take_piece(whole, t.dim, t.extent, rank).clone()


def _one_rank(case: TransitionCase, held: list[Tensor]) -> tuple[Tensor, Tensor]:
    rank = dist.get_rank()
    x = held[rank]
    given = x
    if not case.contiguous and x.dim() > 1:
        given = x.detach().transpose(0, -1).contiguous().transpose(0, -1)
        given = given.requires_grad_()
    with set_current_mesh(device_mesh()), typecheck():
        placements.assert_type(given, {AXIS: case.src})
        y = _called(case, given, rank)
    (gradient,) = torch.autograd.grad(y, given, _cotangent(case, rank, y))
    return y.detach(), gradient


def _called(case: TransitionCase, x: Tensor, rank: int) -> Tensor:
    if case.row.call == "all_to_all":
        sizes: dict[str, Any] = {}
        if case.row.action == "exchange":
            receives = [case.sends[q][rank] for q in range(case.ranks)]
            sizes = {"input_split_sizes": case.sends[rank], "output_split_sizes": receives}
        if case.apart:
            return all_to_all_start(x, AXIS, case.src, case.dst, **sizes).wait()
        return all_to_all(x, AXIS, case.src, case.dst, **sizes)
    call: Any = getattr(placements, case.row.call)
    return call(x, AXIS, src=case.src, dst=case.dst)


def _cotangent(case: TransitionCase, rank: int, y: Tensor) -> Tensor:
    """Return a cotangent of the dual of dst: equal on all ranks for P and I."""
    alike = case.dst.letter in "PI"
    return numbers(y.shape, seeded(case.seed, "w", 0 if alike else rank))


def _check_values(
    case: TransitionCase, held: Sequence[Tensor], outputs: Sequence[Tensor]
) -> None:
    if case.row.action == "exchange":
        parts = [torch.split(x, list(s)) for x, s in zip(held, case.sends, strict=True)]
        for r, y in enumerate(outputs):
            torch.testing.assert_close(y, torch.cat([p[r] for p in parts]), rtol=0, atol=0)
    elif case.row.call == "reinterpret":
        for x, y in zip(held, outputs, strict=True):
            torch.testing.assert_close(y, x, rtol=0, atol=0)
    else:
        wanted, found = _value(held, case.src), _value(outputs, case.dst)
        torch.testing.assert_close(
            found, wanted, rtol=0, atol=0, msg=lambda m: f"{case}\n{m}"
        )


def _value(held: Sequence[Tensor], t: AxisType) -> Tensor:
    """Return the global value; of Varying ones the stack, which stack and unbind keep."""
    if isinstance(t, Shard):
        assert t.extent is not None
        return put_pieces(held, t.dim, t.extent)
    if t.letter == "P":
        return torch.stack(list(held)).sum(0)
    if t.letter == "V":
        return torch.stack(list(held))
    for other in held[1:]:
        torch.testing.assert_close(other, held[0], rtol=0, atol=0)
    return held[0]
