"""Mutants of duals.py and autograd_rules.py: types of gradients, where backward starts."""

from collections.abc import Iterator
from functools import partial

from placements.checker import backward as autograd_rules
from placements.types import axis as duals
from placements.types.axis import BY_LETTER
from tests.mutants.mutant import Mutant, sound
from tests.mutants.patches import Patches


def of_duals() -> Iterator[Mutant]:
    killers = (("duality", ""), *sound("mul", "sum"), ("programs", ""))
    for letter, old in duals.DUALS.items():
        for new in BY_LETTER.values():
            if new != old:
                yield Mutant(
                    "duals", letter, f"{old.letter} -> {new.letter}",
                    lambda p, k=letter, new=new: p.item(duals.DUALS, k, new), killers,
                )  # fmt: skip
    for letter in "RIVP":
        yield Mutant(
            "duals", "S", f"S -> {letter}",
            partial(
                Patches.text, owner=duals, name="dual",
                old="return axis_type", new=f"return {letter}",
            ),
            killers,
        )  # fmt: skip


def of_losses() -> Iterator[Mutant]:
    refusal = ("a mutant", "convert", "I")
    table = autograd_rules.LOSSES
    for letter, verdict in table.items():
        new = refusal if verdict is None else None
        yield Mutant(
            "losses", letter, "accepted -> refused" if new else "refused -> accepted",
            lambda p, letter=letter, new=new: p.item(table, letter, new),
            (("losses", letter),),
        )  # fmt: skip
