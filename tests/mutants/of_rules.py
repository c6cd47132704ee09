"""Mutants of rules.py: how types combine, and what a draw gives."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from placements.inference import rules
from placements.inference.flows import random
from placements.inference.rules import (
    DRAWS,
    LINEAR,
    MULTILINEAR,
    NONLINEAR,
    RULES,
    Linearity,
    Rule,
)
from tests.mutants.mutant import LETTERS, Mutant, decided, sound
from tests.mutants.patches import Patches

BY_LINEARITY: dict[Linearity | None, tuple[str, ...]] = {
    LINEAR: ("add", "where", "cumsum"),
    MULTILINEAR: ("mul", "matmul"),
    NONLINEAR: ("exp", "maximum", "where"),
    None: ("neg", "mul", "exp", "add"),
}


def _replaced_rule(place: int, new: Rule | None, p: Patches) -> None:
    rows = (*RULES[:place], *([] if new is None else [new]), *RULES[place + 1 :])
    p.everywhere(RULES, rows)


def _flipped(rule: Rule) -> Iterator[Rule]:
    """The row with every other result, or with a refusal."""
    for gives in (*LETTERS, None):
        if gives != rule.gives:
            kind = "unsound" if gives is None else "sound"
            yield replace(rule, gives=gives, kind=kind)


def of_rules() -> Iterator[Mutant]:
    for place, rule in enumerate(RULES):
        linearity = rule.linearity.value if rule.linearity else "any"
        row = f"{place} {linearity}, has {rule.has or '-'}, only {rule.only}"
        killers = (("cells", ""), *sound(*BY_LINEARITY[rule.linearity]))
        for new in _flipped(rule):
            change = f"{rule.gives or 'refused'} -> {new.gives or 'refused'}"
            yield Mutant("rules", row, change, partial(_replaced_rule, place, new), killers)
        yield Mutant("rules", row, "dropped", partial(_replaced_rule, place, None), killers)
        if rule.at_most_partials is not None:
            for count in (0, 2):
                new = replace(rule, at_most_partials=count)
                yield Mutant(
                    "rules", row, f"at most {count} sums",
                    partial(_replaced_rule, place, new), killers,
                )  # fmt: skip
    old = rules.PARTIAL_PLUS_NUMBER
    for gives in LETTERS:
        new = replace(old, gives=gives, kind="sound")
        yield Mutant(
            "rules", "PARTIAL_PLUS_NUMBER", f"refused -> {gives}",
            lambda p, new=new: p.everywhere(old, new), decided("add", "masked_fill"),
        )  # fmt: skip


RANDOM = ("dropout", "bernoulli", "multinomial", "normal", "rand_like", "uniform_")


def of_draws() -> Iterator[Mutant]:
    for row in DRAWS:
        for gives in (*LETTERS, None):
            if gives == row.gives:
                continue
            new = replace(row, gives=gives)
            key = row.letter, row.shared
            yield Mutant(
                "draws", f"{row.letter}, {'shared' if row.shared else 'own'} generator",
                f"{row.gives or 'refused'} -> {gives or 'refused'}",
                lambda p, new=new, key=key: p.item(random._DRAW, key, new),
                (("draws", f"{row.letter} {row.shared}"), *sound(*RANDOM)),
            )  # fmt: skip
