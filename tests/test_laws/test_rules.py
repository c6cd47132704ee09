"""Total and tight: every cell of the rule table has an answer, and a reason."""

from collections.abc import Iterator
from itertools import combinations_with_replacement, permutations, product

import pytest
from hypothesis import HealthCheck, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from placements.ops import OPS, SUM
from placements.rules import (
    LINEAR,
    MULTILINEAR,
    NONLINEAR,
    PARTIAL_PLUS_NUMBER,
    RULES,
    join,
)
from placements.testing.cases import calls
from placements.testing.laws.tight import Cell, is_refuted, is_refuted_along

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


def test_every_unsound_cell_has_values_that_no_type_fits() -> None:
    too_strict = [
        cell
        for cell in cells("RVSP")
        if join(cell.linearity, cell.values, cell.controls).gives is None
        and join(cell.linearity, cell.values, cell.controls).kind == "unsound"
        and not is_refuted(cell)
    ]
    assert too_strict == []


def test_accepted_cells_are_not_refuted() -> None:
    """The search must not refute what holds, or it would prove anything."""
    for cell in cells("RSP"):
        if join(cell.linearity, cell.values, cell.controls).gives is not None:
            assert not is_refuted(cell), cell


ALONG = [
    name
    for name, op in OPS.items()
    if op.along and op.along != SUM and op.group in ("reductions", "along a dim")
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ALONG)
def test_a_cut_dim_that_is_refused_has_no_right_type(name: str) -> None:
    cut = st.tuples(calls(name=name), st.integers(0, 2))

    def refuted(case: tuple[object, int]) -> bool:
        call, dim = case
        shape = call.operands[0].shape  # type: ignore[attr-defined]
        one = len(call.operands) == 1  # type: ignore[attr-defined]
        return one and dim < len(shape) and shape[dim] > 1 and is_refuted_along(call, dim)  # type: ignore[arg-type]

    options = settings(
        max_examples=300, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    try:
        find(cut, refuted, settings=options)
    except NoSuchExample:
        pytest.fail(f"{name}: no values show that a cut dim is wrong")
