"""Mutants of extents.py and runs.py: every formula."""

from collections.abc import Iterator
from functools import partial

from placements.inference.transitions import TRANSITIONS
from placements.types import extents
from tests.mutants.mutant import Mutant
from tests.mutants.patches import Patches

# extents: class, method, change, what it says, what the mutant says
FORMULAS: tuple[tuple[type, str, str, str, str], ...] = (
    (extents.Even, "local_size", "one more", "self.rows_in_all // self.bound_ranks",
     "self.rows_in_all // self.bound_ranks + 1"),
    (extents.Even, "offset", "one more", "rank * self.local_size(rank)",
     "rank * self.local_size(rank) + 1"),
    (extents.Even, "to_global", "one more", "index + self.offset(rank)",
     "index + self.offset(rank) + 1"),
    (extents.Even, "to_global", "no offset", "index + self.offset(rank)", "index"),
    (extents.Even, "to_local", "one more", "row % size", "row % size + 1"),
    (extents.Even, "to_local", "another rank", "row // size", "(row + 1) // size"),
    (extents.Even, "scaled", "not scaled", "self.rows_in_all * factor", "self.rows_in_all"),
    (extents.Padded, "stride", "rounded down", "-(-self.rows_in_all // self.bound_ranks)",
     "self.rows_in_all // self.bound_ranks"),
    (extents.Padded, "local_size", "the padded length",
     "min(max(self.rows_in_all - rank * self.stride, 0), self.stride)", "self.stride"),
    (extents.Padded, "local_size", "below zero", "max(self.rows_in_all - rank * self.stride, 0)",
     "(self.rows_in_all - rank * self.stride)"),
    (extents.Padded, "offset", "beyond the end",
     "min(rank * self.stride, self.rows_in_all)", "rank * self.stride"),
    (extents.Padded, "offset", "one more",
     "min(rank * self.stride, self.rows_in_all)",
     "min(rank * self.stride + 1, self.rows_in_all)"),
    (extents.Padded, "to_global", "the rank's own length",
     "rank * self.stride", "rank * self.local_size(rank)"),
    (extents.Padded, "to_local", "one more", "row % self.stride", "row % self.stride + 1"),
    (extents.Padded, "scaled", "not scaled", "size * factor", "size"),
    (extents.Padded, "scaled", "padded anew",
     "Ragged(*(size * factor for size in self.sizes)).canonical()",
     "replace(self, rows_in_all=self.rows_in_all * factor)"),
    (extents.Ragged, "local_size", "the first rank's", "self._sizes[rank]", "self._sizes[0]"),
    (extents.Ragged, "local_size", "one more", "self._sizes[rank]", "self._sizes[rank] + 1"),
    (extents.Ragged, "offset", "the next rank's", "self._starts[rank]",
     "self._starts[rank + 1]"),
    (extents.Ragged, "to_global", "the next rank's", "self._starts[rank]",
     "self._starts[rank + 1]"),
    (extents.Ragged, "to_global", "as if even", "self._starts[rank]",
     "rank * (self.total // len(self._sizes))"),
    (extents.Ragged, "to_local", "ends belong to the rank before (int)",
     "searchsorted(starts, row, right=True)", "searchsorted(starts, row)"),
    (extents.Ragged, "to_local", "ends belong to the rank before (tensor)",
     "row, right=True)\n        return rank", "row)\n        return rank"),
    (extents.Ragged, "scaled", "not scaled", "size * factor", "size"),
    (extents.Ragged, "canonical", "always even", "if self.key(None)[0] == named.__name__:",
     "if True:"),
    (extents.ZigZag, "local_size", "one run", "2 * self.run", "self.run"),
    (extents.ZigZag, "starts", "striped", "(2 * self.bound_ranks - 1 - rank)",
     "(self.bound_ranks + rank)"),
    (extents.ZigZag, "starts", "one rank further back", "- 1 - rank", "- rank"),
    (extents.ZigZag, "offset", "of the second run", "(rank)[0]", "(rank)[1]"),
    (extents.ZigZag, "to_global", "one run", " + index // self.run * between", ""),
    (extents.ZigZag, "to_global", "the first run's length twice", "back - front - self.run",
     "back - front"),
    (extents.ZigZag, "to_local", "striped", "number + half * (2 * self.bound_ranks - 1 - 2 * number)",
     "number - half * self.bound_ranks"),
    (extents.ZigZag, "to_local", "one run", "place + half * self.run", "place"),
    (extents.ZigZag, "scaled", "not scaled", "self.rows_in_all * factor", "self.rows_in_all"),
    (extents.ZigZag, "divided", "by pieces, not runs", "self.run % factor",
     "self.local_size(0) % factor"),
    (extents.ZigZag, "divided", "not divided", "self.rows_in_all // factor", "self.rows_in_all"),
    (extents.Folded, "local_size", "one block", "self.outer * self.inner", "self.inner"),
    (extents.Folded, "offset", "one more", "self.inner.offset(rank)",
     "self.inner.offset(rank) + 1"),
    (extents.Folded, "to_global", "the padded length", "self.inner.local_size(rank)",
     "max(self.inner.sizes)"),
    (extents.Folded, "to_global", "one block", "block * self.inner.total + ", ""),
    (extents.Folded, "to_global", "blocks of local length", "block * self.inner.total",
     "block * length"),
    (extents.Folded, "to_local", "one block (int)",
     "rank, block * self.inner.local_size(rank) + index", "rank, index"),
    (extents.Folded, "to_local", "the first rank's length (int)",
     "self.inner.local_size(rank)", "self.inner.local_size(0)"),
    (extents.Folded, "to_local", "the first rank's length (tensor)",
     "look_up(self.inner.sizes, rank)", "self.inner.sizes[0]"),
    (extents.Folded, "scaled", "blocks are scaled",
     "Folded(self.outer, self.inner.scaled(factor))", "Folded(self.outer * factor, self.inner)"),
    (extents.Folded, "divided", "not divided", "self.inner.divided(factor)", "self.inner"),
)  # fmt: skip


def of_extents() -> Iterator[Mutant]:
    by_pair = {f"{t.src} -> {t.dst}": k for k, t in enumerate(TRANSITIONS)}
    moved = tuple(("moves", str(by_pair[p])) for p in ("S -> R", "S -> S", "R -> S"))
    for owner, name, change, old, new in FORMULAS:
        yield Mutant(
            "extents", f"{owner.__name__}.{name}", change,
            partial(Patches.text, owner=owner, name=name, old=old, new=new),
            (("extents", ""), *moved),
        )  # fmt: skip
