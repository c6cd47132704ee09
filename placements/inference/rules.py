"""Table: how the types of an op's operands, on one mesh axis, give the result's type.

Data only: no torch, no tensors. Operands are letters (R, I, V, S, P); a contraction over
a dim that is cut counts as one P. Rows are tried in order and the first that fits holds.
`flows/` says which operands an op has and where their dims go; `ops.py` says how each op
treats its operands.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Linearity(Enum):
    """How an op depends on its value operands."""

    NONLINEAR = "non-linear"
    LINEAR = "linear"  # in all value operands together: f(a+c, b+d) = f(a,b) + f(c,d)
    MULTILINEAR = "multilinear"  # in each value operand alone, the others held fixed
    NO_VALUES = "-"  # no operand's values reach the result by a rule: factories, draws


NONLINEAR, LINEAR, MULTILINEAR, NO_VALUES = Linearity


@dataclass(frozen=True)
class Rule:
    """One row: the operand types it is for, and what it gives or why it refuses.

    `linearity` None is any. `has`: a letter that must be there. `only`: letters that may
    be there. `values`: letters that the value operands may have.
    """

    linearity: Linearity | None
    has: str
    only: str
    gives: str | None
    reason: str
    values: str = "RIVSP"
    controls: str = "RIVSP"
    at_most_partials: int | None = None
    kind: str = "sound"  # of a refusal: "unsound" (some values go wrong) or "policy"


ANY = "RIVSP"

RULES: tuple[Rule, ...] = (
    Rule(None, "I", "I", "I", "all ranks repeat one computation"),
    Rule(
        None, "I", ANY, None,
        "Invariant mixes with nothing: its gradient would differ by rank and never be "
        "summed",
        kind="unsound",
    ),
    Rule(LINEAR, "P", "PR", "P", "a linear function of a sum is the sum of its parts",
         values="P", controls="R"),
    Rule(
        LINEAR, "P", "VSRP", None,
        "what is chosen or divided differently on each rank is no longer one sum",
        values="P", controls="VSR", kind="unsound",
    ),
    Rule(
        LINEAR, "P", "VSRP", None,
        "a term that is not pending the sum would be counted once per rank",
        controls="VSR", kind="unsound",
    ),
    Rule(
        MULTILINEAR, "P", "PR", "P", "a sum times one common factor is a sum",
        controls="R", at_most_partials=1,
    ),
    Rule(
        MULTILINEAR, "P", "PR", None,
        "the product of two sums is not the sum of the products of their parts",
        controls="R", kind="unsound",
    ),
    Rule(
        MULTILINEAR, "P", "VSRP", None,
        "a sum times a factor that differs by rank is not the sum of the products",
        controls="VSR", kind="unsound",
    ),
    Rule(
        NONLINEAR, "P", ANY, None,
        "a non-linear function of a sum is not the sum of the function of its parts",
        controls="VSR", kind="unsound",
    ),
    Rule(
        None, "P", ANY, None,
        "a choice or a divisor taken from a value that is still pending a sum is wrong "
        "on every rank",
        kind="unsound",
    ),
    Rule(None, "V", "VSR", "V", "each rank computes with its own values"),
    Rule(None, "S", "SR", "S", "each rank computes its piece"),
    Rule(None, "", "R", "R", "equal inputs give equal results"),
)  # fmt: skip

PARTIAL_PLUS_NUMBER = Rule(
    LINEAR, "P", ANY, None,
    "a constant added to every summand would be counted once per rank",
    kind="unsound",
)  # fmt: skip

# What happens to a dim that is cut, where the types alone do not say.
DIM_REASONS: dict[str, str] = {
    "whole operand": (
        "one operand is cut along this dim and the other holds all of it, so rows of "
        "the piece would meet rows of the whole"
    ),
    "other dim": "one axis cannot cut two different dims of the result",
    "other extent": "the pieces differ in their lengths or in their rows",
    "other order": "the axes cut the dim in another order, so the pieces differ",
    "half contraction": (
        "a contraction needs both operands cut the same way along the contracted dim"
    ),
}


def join(linearity: Linearity, values: Iterable[str], controls: Iterable[str] = ()) -> Rule:
    """Return the row that holds for operands of these letters on one axis."""
    value_letters, control_letters = list(values), list(controls)
    letters = {*value_letters, *control_letters} or {"R"}
    for rule in RULES:
        if (
            rule.linearity in (None, linearity)
            and letters >= set(rule.has)
            and letters <= set(rule.only)
            and set(value_letters) <= set(rule.values)
            and set(control_letters) <= set(rule.controls)
            and (
                rule.at_most_partials is None
                or value_letters.count("P") <= rule.at_most_partials
            )
        ):
            return rule
    raise AssertionError(f"no rule for {linearity}, {value_letters}, {control_letters}")


@dataclass(frozen=True)
class Draw:
    """Row: a random mask applied to a value, by whether the ranks share a generator."""

    letter: str
    shared: bool
    gives: str | None
    reason: str


DRAWS: tuple[Draw, ...] = (
    Draw("R", True, "R", "all ranks draw the same numbers"),
    Draw("R", False, "V", "each rank draws its own numbers"),
    Draw("I", True, "I", "all ranks draw the same numbers"),
    Draw("I", False, None, "each rank draws its own numbers, and Invariant mixes with "
         "nothing: draw from a shared generator, or convert to Replicate first"),
    Draw("P", True, "P", "a sum times one common mask is a sum"),
    Draw("P", False, None, "a sum times a mask that differs by rank is no longer one sum"),
    Draw("V", False, "V", "each rank draws its own numbers"),
    Draw("V", True, None, "ranks that share a generator draw the same numbers for "
         "different values"),
    Draw("S", False, "S", "each rank draws the numbers of its own piece"),
    Draw("S", True, None, "ranks that share a generator draw the same numbers for "
         "different rows"),
)  # fmt: skip
