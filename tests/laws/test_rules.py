"""Total and tight: every cell of the rule table has an answer, and a reason."""

from collections.abc import Iterator
from itertools import combinations_with_replacement, permutations, product

from placements.inference.rules import (
    LINEAR,
    MULTILINEAR,
    NONLINEAR,
    PARTIAL_PLUS_NUMBER,
    RULES,
    join,
)
from placements.testing.laws.tight import Cell, is_refuted, right_types

LINEARITIES = (LINEAR, MULTILINEAR, NONLINEAR)


def cells(letters: str = "RIVSP") -> Iterator[Cell]:
    for linearity, values, controls in product(LINEARITIES, range(1, 4), range(3)):
        for v in combinations_with_replacement(letters, values):
            for c in combinations_with_replacement(letters, controls):
                yield Cell(linearity, "".join(v), "".join(c))


def test_every_cell_gives_a_type_or_a_reason() -> None:
    for cell in cells():
        rule = join(cell.linearity, cell.values, cell.controls)
        assert rule.gives in (*"RIVSP", None) and rule.reason, cell


def test_the_order_of_operands_does_not_matter() -> None:
    for cell in cells():
        rule = join(cell.linearity, cell.values, cell.controls)
        for values in permutations(cell.values):
            assert join(cell.linearity, values, cell.controls) is rule, cell


def test_grouping_does_not_matter_for_sums() -> None:
    for a, b, c in product("RIVSP", repeat=3):
        left, right = join(LINEAR, (a, b)).gives, join(LINEAR, (b, c)).gives
        first = left and join(LINEAR, (left, c)).gives
        second = right and join(LINEAR, (a, right)).gives
        assert (first or None) == (second or None) == join(LINEAR, (a, b, c)).gives


def test_forgetting_pieces_rejects_nothing_that_was_accepted() -> None:
    for cell in cells():
        if join(cell.linearity, cell.values, cell.controls).gives is None:
            continue
        values, controls = cell.values.replace("S", "V"), cell.controls.replace("S", "V")
        assert join(cell.linearity, values, controls).gives is not None, cell


def test_every_rule_is_reached() -> None:
    reached = {id(join(c.linearity, c.values, c.controls)) for c in cells()}
    assert [rule for rule in RULES if id(rule) not in reached] == []


def test_every_refusal_says_why_it_is_one() -> None:
    for rule in (*RULES, PARTIAL_PLUS_NUMBER):
        if rule.gives is None:
            assert rule.kind in ("unsound", "policy"), rule


def few_operands() -> Iterator[Cell]:
    """Cells of up to three operands: enough to show every row."""
    return (cell for cell in cells() if len(cell.letters) <= 3)


def test_every_refused_cell_has_values_that_no_type_fits() -> None:
    too_strict = [
        cell
        for cell in few_operands()
        if join(cell.linearity, cell.values, cell.controls).gives is None
        and not is_refuted(cell)
    ]
    assert too_strict == []


def test_the_type_that_a_cell_gives_is_right() -> None:
    for cell in few_operands():
        gives = join(cell.linearity, cell.values, cell.controls).gives
        if gives is None:
            continue
        # Varying operands are drawn as pieces, so the result is one, forgotten.
        gives = "S" if gives == "V" else gives
        assert all(gives in right_types(cell, seed) for seed in range(3)), cell


def test_nothing_varying_comes_of_what_is_not() -> None:
    for cell in cells():
        gives = join(cell.linearity, cell.values, cell.controls).gives
        assert gives is None or (gives == "V") == ("V" in cell.letters), cell
