"""Mutants of transitions.py and moves.py: collectives, casts, and their backward."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from placements.collectives import moves
from placements.inference import transitions
from placements.inference.transitions import TRANSITIONS, Transition
from tests.mutants.killers import Killer
from tests.mutants.mutant import Mutant
from tests.mutants.patches import Patches


def all_moves() -> tuple[Killer, ...]:
    return tuple(("moves", str(k)) for k in range(len(TRANSITIONS)))


# Actions that take and give tensors of the same shapes.
ALIKE = (
    {"same", "first only", "sum"},
    {"gather", "place"},
    {"cut", "sum and cut"},
    {"stack", "place row"},
    {"unbind", "sum and unbind"},
)


def _other_actions(action: str) -> list[str]:
    return sorted({a for group in ALIKE if action in group for a in group} - {action})


def _replaced_row(place: int, new: Transition, p: Patches) -> None:
    p.everywhere(TRANSITIONS, (*TRANSITIONS[:place], new, *TRANSITIONS[place + 1 :]))
    p.item(transitions._BY_CALL, (new.call, new.src, new.dst), new)
    if new.call != "reinterpret":
        p.item(transitions._MEANING_KEPT, (new.src, new.dst), new)


def of_transitions() -> Iterator[Mutant]:
    for place, row in enumerate(TRANSITIONS):
        killers = (("moves", str(place)), ("duality", ""), *all_moves())
        for action in _other_actions(row.action):
            new = replace(row, action=action)
            yield Mutant(
                "transitions", f"{row.call} {row.src} -> {row.dst}",
                f"{row.action} -> {action}", partial(_replaced_row, place, new), killers,
            )  # fmt: skip


def _other_backward(row: Transition, action: str, p: Patches) -> None:
    original = transitions.dual_transition

    def dual_transition(given: Transition) -> Transition:
        found = original(given)
        return replace(found, action=action) if given == row else found

    p.everywhere(original, dual_transition)


# function or class, name, change, what it says, what the mutant says, rows that meet it
MOVES: tuple[tuple[Any, str, str, str, str, str], ...] = (
    (moves.Move, "dual", "sends are not exchanged",
     "sends=self.receives,", "sends=self.sends,", "V -> V"),
    (moves.Move, "dual", "receives are not exchanged",
     "receives=self.sends,", "receives=self.receives,", "V -> V"),
    (moves.Move, "dual", "the source's cut is kept",
     "src_cut=self.dst_cut,", "src_cut=self.src_cut,", "S -> S"),
    (moves.Move, "dual", "the target's cut is kept",
     "dst_cut=self.src_cut,", "dst_cut=self.dst_cut,", "S -> S"),
    (moves, "_first_only", "on every rank",
     "move.ranks.rank == 0", "move.ranks.rank >= 0", "R -> P"),
    (moves, "_unbind", "the first row",
     "move.ranks.rank", "0", "R -> V"),
    (moves, "_cut", "the first piece",
     "move.ranks.rank", "0", "R -> S"),
    (moves, "_place_row", "in the first row",
     "rank == move.ranks.rank", "rank == 0", "V -> P"),
    (moves.transport, "sum_rows", "an average",
     "reduced.view(x.shape[1:])", "reduced.view(x.shape[1:]) / ranks.size", "P -> S"),
    (moves.transport, "sum_over", "without the sum",
     'functional.all_reduce(x.contiguous(), "sum", ranks.group_name)', "x.clone()", "P -> R"),
    (moves.transport, "start_exchange", "sends and receives exchanged",
     "list(receives), list(sends)", "list(sends), list(receives)", "V -> V"),
    (moves.transport, "gather_pieces", "pad rows are kept",
     "p.narrow(dim, 0, s) for p, s", "p for p, s", "S -> R"),
    (moves.transport, "sum_and_cut", "pad rows are kept",
     "mine.narrow(dim, 0, extent.local_size(ranks.rank))", "mine", "P -> S"),
    (moves.transport, "place_piece", "at the first rank's place",
     "rank == ranks.rank", "rank == 0", "S -> P"),
    (moves.transport, "put_blocks", "pad rows are kept",
     "block.narrow(new_dim, 0, mine).narrow(old_dim, 0, size)", "block", "S -> S"),
)  # fmt: skip


def of_backwards() -> Iterator[Mutant]:
    for place, row in enumerate(TRANSITIONS):
        back = transitions.dual_transition(row)
        for action in _other_actions(back.action):
            yield Mutant(
                "backward", f"{row.call} {row.src} -> {row.dst}",
                f"{back.action} -> {action}", partial(_other_backward, row, action),
                (("moves", str(place)), ("duality", "")),
            )  # fmt: skip
    for owner, name, change, old, new, pair in MOVES:
        rows = [k for k, t in enumerate(TRANSITIONS) if f"{t.src} -> {t.dst}" == pair]
        yield Mutant(
            "backward", f"{owner.__name__.rpartition('.')[2]}.{name}", change,
            partial(Patches.text, owner=owner, name=name, old=old, new=new),
            (*(("moves", str(k)) for k in rows), *all_moves()),
        )  # fmt: skip
