"""Precise: nothing Varying comes of operands that are not.

Operands that are Replicate, Invariant, Partial or pieces stand for global values, so there
is a global result. A result that is merely Varying has lost it: either another type holds,
and the rule forgets too much, or none does, and the call must be refused. An op whose row
says that it `forgets`, and why, may do so; and where every rank draws its own numbers,
values that were equal no longer are.
"""

from collections.abc import Sequence

from placements.inference.ops import OPS
from placements.testing.laws.placed_calls import PlacedCall
from placements.types.tensor import TensorType


def forgets(name: str) -> str:
    """Return why the op of that name may forget; empty if it may not."""
    plain = name if name in OPS else name.removesuffix("_")
    return OPS[plain].forgets


def check_precise(placed: PlacedCall, results: Sequence[TensorType]) -> None:
    """Raise AssertionError if a result is Varying for no reason; its types on one rank."""
    given = [types[0] for types in placed.types]
    if not given or any(t.letter == "V" for types in given for t in types.types):
        return
    if forgets(placed.call.name):
        return
    for result in results:
        if result.fresh is not None:
            continue
        for axis, t in result.items():
            drawn = placed.call.drawn and axis not in placed.shared
            if t.letter == "V" and not (
                drawn and all(x[axis].letter == "R" for x in given)
            ):
                raise AssertionError(
                    f"{placed!r}: no operand is Varying, yet the result is {result!r}"
                )
