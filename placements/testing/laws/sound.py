"""Sound: what the checker accepts computes the single-device result, and its gradients.

The law loops over the table of ops itself. Operands are drawn on all ranks of a drawn
mesh; every rank runs the real op under the real checker; the results, joined by the
types that the checker inferred, must be the op on the global values. The backward of
every rank is seeded with its part of one global cotangent, as the dual of the inferred
type says, and the gradients must join, by the dual of the operand's type, to the global
gradient. Nothing communicates, so ranks are a loop.

On an axis where something is Varying there is no global value: there the ranks are kept
apart, and each is compared with the op on what it holds together with the other axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from placements.declarations import type_of
from placements.errors import PlacementError
from placements.index import Index
from placements.mesh import Mesh, set_current_mesh
from placements.propagate import typecheck
from placements.state import shared_generator
from placements.tags import put
from placements.tensor_type import TensorType
from placements.testing.cases import Call, Given, calls
from placements.testing.placed import (
    Place,
    join_ranks,
    on_axes,
    places,
    split_ranks,
)
from placements.testing.strategies import (
    layouts,
    likely_types,
    meshes,
    numbers,
    seeded,
    seeds,
)


class Invalid(Exception):
    """The drawn values do not go with the drawn shapes; nothing was learned."""


@dataclass(frozen=True)
class PlacedCall:
    """A call, and what every rank holds of its operands."""

    call: Call
    mesh: Mesh
    types: Sequence[Sequence[TensorType]]  # by operand, by rank
    seed: int
    special: bool  # whether a NaN and an infinity are among the values
    shared: tuple[str, ...]  # axes on which the ranks' random generators are alike

    def __repr__(self) -> str:
        operands = ", ".join(
            f"x{k}: {str(given.dtype)[6:]}{list(given.shape)}{types[0]!r}"
            + (f" {types[0].index!r}" if types[0].index else "")
            for k, (given, types) in enumerate(
                zip(self.call.operands, self.types, strict=True)
            )
        )
        return f"{self.call.text} where {operands} on {self.mesh!r}, seed {self.seed}"

    def locals(self) -> list[list[Tensor]]:
        """By operand, by rank."""
        return [self._held(k) for k in range(len(self.call.operands))]

    def _held(self, k: int) -> list[Tensor]:
        given, types = self.call.operands[k], self.types[k]
        index = types[0].index
        if isinstance(index, Index) and index.cuts:
            return self._own_rows(given, types)
        generator = seeded(self.seed, k)

        def value(place: Place) -> Tensor:
            drawn = _global_value(given, self.call, generator)
            if self.special and given.dtype.is_floating_point and drawn.numel() > 1:
                drawn.view(-1)[0] = float("inf")
                drawn.view(-1)[-1] = float("nan")
            return drawn

        return split_ranks(value, types, self.mesh, generator)

    def _own_rows(self, given: Given, types: Sequence[TensorType]) -> list[Tensor]:
        """An index of each rank's own rows: drawn by rank."""
        assert given.rows_of is not None
        target, dim = given.rows_of
        apart = [axis for axis, t in types[0].items() if t.letter in "VS"]
        blank = torch.zeros(given.shape, dtype=given.dtype)
        shapes = split_ranks(lambda _: blank, types, self.mesh, seeded(0))
        held: list[Tensor] = []
        for r, place in enumerate(places(self.mesh)):
            cuts = self.types[target][r].cuts(dim)
            axis, extent = cuts[-1]
            rows = extent.local_size(self.types[target][r].mesh.coordinate[axis])
            generator = seeded(self.seed, "rows", on_axes(self.mesh, place, apart))
            shape = tuple(shapes[r].shape)
            held.append(_rows(shape, rows, given, generator))
        return held


def _global_value(given: Given, call: Call, generator: torch.Generator) -> Tensor:
    if given.rows_of is not None:
        target, dim = given.rows_of
        return _rows(given.shape, call.operands[target].shape[dim], given, generator)
    if given.ends is not None:
        ends = torch.randint(0, given.ends + 1, given.shape, generator=generator)
        ends = ends.sort().values
        ends[-1:] = given.ends
        return ends.to(given.dtype)
    if given.below is not None:
        return torch.randint(0, given.below, given.shape, generator=generator).to(given.dtype)
    drawn = numbers(given.shape, generator, given.dtype)
    return drawn.abs() + 1 if given.positive else drawn


def _rows(
    shape: tuple[int, ...], rows: int, given: Given, generator: torch.Generator
) -> Tensor:
    numel = torch.Size(shape).numel()
    if numel and not rows:
        raise Invalid("an index into no rows")
    if not given.unique:
        return torch.randint(0, max(rows, 1), shape, generator=generator)
    if shape and shape[given.along] > rows:
        raise Invalid("more different rows than there are")
    order = torch.rand((*shape[: given.along], rows, *shape[given.along + 1 :]), generator=generator)
    return order.argsort(given.along).narrow(given.along, 0, shape[given.along]).clone()


@st.composite
def placed_calls(draw: st.DrawFn, *, name: str) -> PlacedCall:
    """Calls of one op with operands on all ranks of a mesh."""
    call = draw(calls(name=name))
    mesh = draw(meshes())
    likely = draw(likely_types(mesh=mesh))
    types: list[list[TensorType]] = []
    for given in call.operands:
        layout = draw(
            layouts(mesh=mesh, ndim=len(given.shape), letters=given.letters, likely=likely)
        )
        types.append(layout.types(mesh, given.shape))
    for k, given in enumerate(call.operands):
        if given.rows_of is not None:
            types[k] = draw(_with_domain(call, given, types[k], types[given.rows_of[0]]))
    shared = tuple(axis for axis in mesh.axes if call.drawn and draw(st.booleans()))
    special = draw(st.integers(0, 9)) == 9
    return PlacedCall(call, mesh, types, draw(seeds()), special, shared)


@st.composite
def _with_domain(
    draw: st.DrawFn,
    call: Call,
    given: Given,
    types: Sequence[TensorType],
    target: Sequence[TensorType],
) -> list[TensorType]:
    """The index's types with the domain that fits, or now and then with none."""
    assert given.rows_of is not None
    k, dim = given.rows_of
    whole = Index(call.operands[k].shape[dim])
    form = draw(st.sampled_from(["fits", "fits", "fits", "none", "whole"]))
    if form == "none":
        return list(types)
    if form == "whole" or not target[0].cuts(dim):
        return [t.with_index(whole) for t in types]
    return [
        t.with_index(Index.of_cuts(its.cuts(dim)))
        for t, its in zip(types, target, strict=True)
    ]


@dataclass
class Tally:
    """What a law has seen of one op: a law that accepted nothing shows nothing."""

    tried: int = 0
    accepted: int = 0
    letters: set[str] = field(default_factory=lambda: set[str]())
    gradients: int = 0


def check_sound(placed: PlacedCall, tally: Tally | None = None) -> bool:
    """Whether the checker accepts the call; AssertionError if it does so wrongly."""
    tally = tally or Tally()
    tally.tried += 1
    try:
        held = placed.locals()
    except Invalid:
        return False
    ranks = _run_ranks(placed, held)
    if ranks is None:
        return False
    _check_same_types(placed, ranks)
    tally.accepted += 1
    tally.letters |= {t.letter for types in placed.types for t in types[0].types}
    try:
        _Comparison(placed, held, ranks, tally).run()
    except ValueError as error:  # what a type calls equal, or pieces, is not
        raise AssertionError(f"{placed!r}: {error}; {ranks[0].types}") from error
    return True


@dataclass
class _Rank:
    """What one rank did."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    types: list[TensorType]


def _run_ranks(placed: PlacedCall, held: Sequence[Sequence[Tensor]]) -> list[_Rank] | None:
    """Run the call on every rank; None if one of them refuses, or torch does there."""
    ranks: list[_Rank] = []
    for r, place in enumerate(placed.mesh.coordinates()):
        try:
            ranks.append(_run_rank(placed, r, place, [h[r] for h in held]))
        except (PlacementError, RuntimeError, IndexError, ValueError):
            return None
    return ranks


def _run_rank(
    placed: PlacedCall, r: int, place: dict[str, int], held: Sequence[Tensor]
) -> _Rank:
    inputs = [
        x.detach().clone().requires_grad_(given.has_gradient)
        for x, given in zip(held, placed.call.operands, strict=True)
    ]
    alone = [p for axis, p in place.items() if axis not in placed.shared]
    torch.manual_seed(1 + sum(p * 7**k for k, p in enumerate(alone)))
    with set_current_mesh(placed.mesh.seen_from(place)), typecheck():
        for x, types in zip(inputs, placed.types, strict=True):
            put(x, types[r])
        with shared_generator(*placed.shared):
            outputs = tensors_in(placed.call.run(*inputs))
        types = [type_of(output) for output in outputs]
    found = [t for t in types if t is not None]
    assert len(found) == len(types), f"{placed!r}: a result without a type"
    return _Rank(inputs, outputs, found)


def tensors_in(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [x for x in result if isinstance(x, Tensor)]


def _check_same_types(placed: PlacedCall, ranks: Sequence[_Rank]) -> None:
    """All ranks infer the same, extents of inner cuts aside."""
    said = {
        tuple(
            tuple((a, t.letter, getattr(t, "dim", None)) for a, t in one.items())
            for one in rank.types
        )
        for rank in ranks
    }
    assert len(said) == 1, f"{placed!r}: the ranks infer different types: {said}"


class _Comparison:
    """The results of all ranks against the global ones."""

    def __init__(
        self,
        placed: PlacedCall,
        held: Sequence[Sequence[Tensor]],
        ranks: Sequence[_Rank],
        tally: Tally,
    ) -> None:
        self.placed, self.held, self.ranks, self.tally = placed, held, ranks, tally
        self.mesh = placed.mesh
        self.count = len(ranks[0].outputs)
        self.types = [[rank.types[k] for rank in ranks] for k in range(self.count)]
        self.apart = self._apart()

    def _apart(self) -> list[str]:
        """The axes on which ranks are kept apart: Varying ones, and cuts outside them."""
        every = [*self.placed.types, *self.types]
        apart = {a for types in every for a, t in types[0].items() if t.letter == "V"}
        # Own rows: an index that is Varying on an axis addresses one rank's piece there.
        while True:
            wider = set(apart)
            for types in every:
                for dim in {getattr(t, "dim", -1) for t in types[0].types} - {-1}:
                    order = types[0].order(dim)
                    inner = [k for k, axis in enumerate(order) if axis in apart]
                    wider |= set(order[: max(inner, default=0)])
            if wider == apart:
                return [axis for axis in self.mesh.sizes if axis in apart]
            apart = wider

    def run(self) -> None:
        counts = {len(rank.outputs) for rank in self.ranks}
        assert len(counts) == 1, f"{self.placed!r}: {counts} results, by rank"
        for k in range(self.count):
            self._check_claims(k)
        if self.placed.call.drawn:
            return
        outputs = [
            join_ranks([r.outputs[k].detach() for r in self.ranks], self.types[k], self.mesh, self.apart)
            if not self.types[k][0].is_number
            else {}
            for k in range(self.count)
        ]
        cotangents: list[dict[Place, Tensor]] = [{} for _ in range(self.count)]
        expected: dict[Place, list[Tensor | None]] = {}
        for place, values in self._global_inputs().items():
            results = self._reference(values, [o.get(place) for o in outputs])
            for k, result in enumerate(results):
                self._compare_output(k, result, outputs[k].get(place))
                generator = seeded(self.placed.seed, "cotangent", k, place)
                drawn = numbers(result.shape, generator)
                # No zeros: zero times an infinite derivative is not what its parts give.
                cotangents[k][place] = (drawn + (drawn == 0)).to(result.dtype)
            expected[place] = _gradients(
                results, [c[place] for c in cotangents], values
            )
        self._compare_gradients(cotangents, expected)

    def _global_inputs(self) -> dict[Place, list[Tensor]]:
        """The operands, joined over all axes that are not kept apart."""
        joined = [
            join_ranks(self._global_rows(k), self.placed.types[k], self.mesh, self.apart)
            for k in range(len(self.held))
        ]
        apart = Mesh({axis: self.mesh.sizes[axis] for axis in self.apart})
        return {
            place: [
                values[place].detach().clone().requires_grad_(given.has_gradient)
                for values, given in zip(joined, self.placed.call.operands, strict=True)
            ]
            for place in places(apart)
        }

    def _check_claims(self, k: int) -> None:
        """A result says no more than its operands: nothing Varying becomes equal."""
        types = self.types[k]
        if types[0].is_number:
            return
        own = [a for a in self.apart if types[0].get(a) is not None and types[0][a].letter == "V"]
        held = [rank.outputs[k].detach() for rank in self.ranks]
        if types[0].fresh is not None or self.placed.call.drawn:
            if not any(t.letter == "S" for t in types[0].types):
                join_ranks(held, types, self.mesh, own)
            return
        for axis in self.apart:
            if axis not in types[0] or types[0][axis].letter in "VRIS":
                continue
            raise AssertionError(
                f"{self.placed!r}: {axis} is Varying, yet the result is {types[0]!r}"
            )
        closed = [a for a in self.apart if a in types[0] and types[0][a].letter in "VS"]
        join_ranks(held, types, self.mesh, closed)

    def _global_rows(self, k: int) -> list[Tensor]:
        """Locals of an operand, with own rows counted over the axes that are joined."""
        index = self.placed.types[k][0].index
        if not (isinstance(index, Index) and index.cuts):
            return list(self.held[k])
        converted: list[Tensor] = []
        for r, local in enumerate(self.held[k]):
            domain = self.placed.types[k][r].index
            assert isinstance(domain, Index)
            coordinate = self.placed.types[k][r].mesh.coordinate
            for axis, extent in reversed(domain.cuts):
                if axis not in self.apart:
                    local = extent.to_global(local, coordinate[axis])
            converted.append(local)
        return converted

    def _reference(
        self, values: Sequence[Tensor], joined: Sequence[Tensor | None]
    ) -> list[Tensor]:
        call = self.placed.call
        if call.reference is not None:
            assert joined[0] is not None
            return [call.reference(*values, joined[0].shape)]
        return tensors_in(call.run(*values))

    def _compare_output(self, k: int, wanted: Tensor, joined: Tensor | None) -> None:
        if joined is None:  # one number, given a shape: any shape will do
            numbers_seen = {
                x for rank in self.ranks for x in rank.outputs[k].detach().flatten().tolist()
            }
            assert numbers_seen <= set(wanted.flatten().tolist()) | numbers_seen, self.placed
            assert len(numbers_seen) <= 1, f"{self.placed!r}: more than one number"
            return
        close(joined, wanted.detach(), f"{self.placed!r}: result {k}, {self.types[k][0]!r}")

    def _compare_gradients(
        self,
        cotangents: Sequence[dict[Place, Tensor]],
        expected: dict[Place, list[Tensor | None]],
    ) -> None:
        if not any(output.requires_grad for output in self.ranks[0].outputs):
            return
        seeds_by_output = [self._seeds(k, cotangents[k]) for k in range(self.count)]
        found: list[list[Tensor | None]] = []
        for r, rank in enumerate(self.ranks):
            found.append(
                _gradients(rank.outputs, [s[r] for s in seeds_by_output], rank.inputs)
            )
        for k, given in enumerate(self.placed.call.operands):
            grads = [f[k] for f in found]
            if not given.has_gradient or all(g is None for g in grads):
                continue
            self.tally.gradients += 1
            duals = [t.dual() for t in self.placed.types[k]]
            filled = [
                torch.zeros_like(rank.inputs[k]) if g is None else g
                for g, rank in zip(grads, self.ranks, strict=True)
            ]
            joined = join_ranks(filled, duals, self.mesh, self.apart)
            for place, wanted in expected.items():
                target = wanted[k]
                if target is None:
                    target = torch.zeros_like(joined[place])
                # Where the gradient is infinite, parts of a cotangent that sum to zero
                # do not cancel, on one device neither.
                finite = target.isfinite()
                zero = torch.zeros(())
                close(
                    torch.where(finite, joined[place], zero),
                    torch.where(finite, target, zero),
                    f"{self.placed!r}: gradient of x{k}",
                )

    def _seeds(self, k: int, cotangent: dict[Place, Tensor]) -> list[Tensor]:
        """Every rank's part of the cotangent of one result."""
        types = self.types[k]
        if types[0].is_number or not self.ranks[0].outputs[k].requires_grad:
            return [torch.zeros_like(rank.outputs[k]) for rank in self.ranks]
        seeds_found: list[Tensor] = [torch.empty(0)] * len(self.ranks)
        order = places(self.mesh)
        rest = [axis for axis in self.mesh.sizes if axis not in self.apart]
        sub = Mesh({axis: self.mesh.sizes[axis] for axis in rest})
        for place, value in cotangent.items():
            members = [r for r, p in enumerate(order) if on_axes(self.mesh, p, self.apart) == place]
            parts = split_ranks(
                lambda _, value=value: value,
                [_only(types[r].dual(), sub, order[r], self.mesh) for r in members],
                sub,
                seeded(self.placed.seed, "parts", k, place),
            )
            for r, part in zip(members, parts, strict=True):
                seeds_found[r] = part
        return seeds_found


def _only(t: TensorType, sub: Mesh, place: Place, mesh: Mesh) -> TensorType:
    """The type on some of the axes."""
    from placements.tensor_type import make

    coordinate = dict(zip(mesh.sizes, place, strict=True))
    here = sub.seen_from({axis: coordinate[axis] for axis in sub.sizes})
    return make(here, {axis: x for axis, x in t.items() if axis in sub.sizes})


def _gradients(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    try:
        found = torch.autograd.grad(
            [o for o, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True
        )
    except (RuntimeError, NotImplementedError):  # torch has no derivative for it
        return [None] * len(inputs)
    grads = iter(found)
    return [next(grads) if x.requires_grad else None for x in inputs]


def close(found: Tensor, wanted: Tensor, what: str) -> None:
    """Equal but for rounding: values are small, so a wrong one is far off."""
    low = wanted.dtype in (torch.float32, torch.bfloat16, torch.float16)
    tolerance = 1e-2 if low else 1e-9
    torch.testing.assert_close(
        found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True,
        msg=lambda text: f"{what}\n{text}\nfound {found.tolist()}\nwanted {wanted.tolist()}",
    )  # fmt: skip
