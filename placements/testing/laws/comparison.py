"""The results of all ranks against the global ones: values, then gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from placements.testing.compare.one_device import check_value, gradients
from placements.testing.draw.placed import Place, join_ranks, on_axes, places, split_ranks
from placements.testing.draw.whole_numbers import nonzero_numbers, seeded
from placements.testing.laws.placed_calls import PlacedCall
from placements.types.index import Index
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType, make


@dataclass
class Tally:
    """What a law has seen of one op: a law that accepted nothing shows nothing."""

    tried: int = 0
    accepted: int = 0
    letters: set[str] = field(default_factory=lambda: set[str]())
    gradients: int = 0
    operands: int = 0


@dataclass
class RankResult:
    """What one rank did."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    types: list[TensorType]


def tensors_in(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [x for x in result if isinstance(x, Tensor)]


class Comparison:
    """The results of all ranks against the global ones."""

    def __init__(
        self,
        placed: PlacedCall,
        held: Sequence[Sequence[Tensor]],
        ranks: Sequence[RankResult],
        tally: Tally,
    ) -> None:
        self.placed, self.held, self.ranks, self.tally = placed, held, ranks, tally
        self.mesh = placed.mesh
        self.count = len(ranks[0].outputs)
        self.types = [[rank.types[k] for rank in ranks] for k in range(self.count)]
        self.apart = self._apart()

    def _apart(self) -> list[str]:
        """Return the axes that keep ranks apart: Varying ones, and cuts outside them."""
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
            join_ranks(
                [r.outputs[k].detach() for r in self.ranks],
                self.types[k],
                self.mesh,
                self.apart,
            )
            if not self.types[k][0].is_number
            else {}
            for k in range(self.count)
        ]
        cotangents: list[dict[Place, Tensor]] = [{} for _ in range(self.count)]
        expected: dict[Place, list[Tensor | None]] = {}
        for place, values in self.global_inputs().items():
            results = self._reference(values, [o.get(place) for o in outputs])
            for k, result in enumerate(results):
                self._compare_output(k, result, outputs[k].get(place))
                generator = seeded(self.placed.seed, "cotangent", k, place)
                drawn = nonzero_numbers(result.shape, generator)
                cotangents[k][place] = drawn.to(result.dtype)
            seeds = [cotangent[place] for cotangent in cotangents]
            expected[place] = gradients_if_any(results, seeds, values)
        self._compare_gradients(cotangents, expected)

    def global_inputs(self) -> dict[Place, list[Tensor]]:
        """Return the operands, joined over all axes that are not kept apart."""
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
        """Check that nothing Varying is called equal in a result."""
        types = self.types[k]
        if types[0].is_number:
            return
        own = [
            a
            for a in self.apart
            if types[0].get(a) is not None and types[0][a].letter == "V"
        ]
        held = [rank.outputs[k].detach() for rank in self.ranks]
        if types[0].fresh is not None or self.placed.call.drawn:
            if not any(t.letter == "S" for t in types[0].types):
                join_ranks(held, types, self.mesh, own)
            return
        varying = {a for t in self.placed.types for a, x in t[0].items() if x.letter == "V"}
        for axis in self.apart:
            if axis not in types[0] or types[0][axis].letter in "VRI":
                continue
            if types[0][axis].letter == "S" and axis not in varying:
                continue  # cut outside of what is Varying
            raise AssertionError(
                f"{self.placed!r}: {axis} is Varying, yet the result is {types[0]!r}"
            )
        closed = [a for a in self.apart if a in types[0] and types[0][a].letter in "VS"]
        join_ranks(held, types, self.mesh, closed)

    def _global_rows(self, k: int) -> list[Tensor]:
        """Return an operand's locals; own rows are counted over the joined axes."""
        index = self.placed.types[k][0].index
        if not (isinstance(index, Index) and index.cuts):
            return list(self.held[k])
        converted: list[Tensor] = []
        for r, local in enumerate(self.held[k]):
            domain = self.placed.types[k][r].index
            assert isinstance(domain, Index)
            coordinate = self.placed.types[k][r].mesh.place
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
            seen = torch.cat([rank.outputs[k].detach().flatten() for rank in self.ranks])
            every = torch.cat([seen, wanted.detach().flatten()])
            assert bool((every == every[:1]).all()), f"{self.placed!r}: several numbers"
            return
        what = f"{self.placed!r}: result {k}, {self.types[k][0]!r}"
        check_value(what, joined, wanted)

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
                gradients_if_any(rank.outputs, [s[r] for s in seeds_by_output], rank.inputs)
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
                check_value(
                    f"{self.placed!r}: gradient of x{k}",
                    torch.where(finite, joined[place], zero),
                    torch.where(finite, target, zero),
                )

    def _seeds(self, k: int, cotangent: dict[Place, Tensor]) -> list[Tensor]:
        """Return every rank's part of the cotangent of one result."""
        types = self.types[k]
        if types[0].is_number or not self.ranks[0].outputs[k].requires_grad:
            return [torch.zeros_like(rank.outputs[k]) for rank in self.ranks]
        seeds_found: list[Tensor] = [torch.empty(0)] * len(self.ranks)
        order = places(self.mesh)
        rest = [axis for axis in self.mesh.sizes if axis not in self.apart]
        sub = Mesh({axis: self.mesh.sizes[axis] for axis in rest})
        for place, value in cotangent.items():
            members = [
                r for r, p in enumerate(order) if on_axes(self.mesh, p, self.apart) == place
            ]
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
    """Return the type on some of the axes."""
    coordinate = dict(zip(mesh.sizes, place, strict=True))
    here = sub.seen_from({axis: coordinate[axis] for axis in sub.sizes})
    return make(here, {axis: x for axis, x in t.items() if axis in sub.sizes})


def gradients_if_any(
    results: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of the inputs; None of each if torch has no derivative."""
    try:
        return gradients(results, cotangents, inputs)
    except (RuntimeError, NotImplementedError):
        return [None] * len(inputs)
