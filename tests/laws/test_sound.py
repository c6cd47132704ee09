"""Sound: every op of the table, in place or not, computes the single-device result."""

import pytest
import torch
from hypothesis import Phase, find, given, settings

from placements import (
    P,
    PlacementError,
    S,
    assert_type,
    set_current_mesh,
    type_of,
    typecheck,
)
from placements.inference.ops import OPS, OWN_COUNT, ROWS
from placements.testing.cases import CASES, NOT_CALLED, Given, OpCall, call_names
from placements.testing.draw.placed import CutPattern, UnsizedShard, UnsizedType
from placements.testing.laws.comparison import Tally
from placements.testing.laws.placed_calls import InvalidCallError, PlacedCall, placed_calls
from placements.testing.laws.sound import (
    check_forgetting,
    check_sound,
    require_accepted,
    run_each_rank,
)
from placements.types.axis import R, V
from placements.types.mesh import Mesh

# Names share their flow with the others of their row, so the examples of a profile are
# spread over the names.
SHARE = 100


def test_every_op_has_a_case() -> None:
    # Of the table's own rows: other packages may have registered ops of theirs.
    names = {name for row in ROWS for name in row.names.split()}
    assert names - set(CASES) - set(NOT_CALLED) == set()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", call_names())
def test_accepted_calls_equal_one_device(name: str) -> None:
    tally = Tally()
    count = max(settings().max_examples // SHARE, 25)

    def law(placed: PlacedCall) -> None:
        if check_sound(placed, tally):
            check_forgetting(placed)

    # Ops of many operands are refused more often, so they may need more examples.
    for examples in (count, 5 * count):
        settings(max_examples=examples)(given(placed_calls(name=name))(law))()
        if tally.letters & set("SPR") or not tally.operands:
            break
    require_accepted(name, tally)


@pytest.mark.filterwarnings("ignore")
def test_the_law_finds_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A non-linear op called linear must not pass."""
    from placements.checker.lookup import KNOWN

    monkeypatch.setitem(OPS, "exp", OPS["neg"])
    KNOWN.clear()

    @settings(max_examples=200, database=None)
    @given(placed_calls(name="exp"))
    def law(placed: PlacedCall) -> None:
        check_sound(placed)

    try:
        with pytest.raises(AssertionError, match="exp"):
            law()
    finally:
        KNOWN.clear()


def test_what_is_varying_may_be_cut_in_other_ways_by_each_rank() -> None:
    """Each dp rank holds a run of its own, so their cuts over tp need not be alike."""
    mesh = Mesh({"dp": 2, "tp": 4})
    rows = UnsizedType({"dp": UnsizedShard(0), "tp": UnsizedShard(0, CutPattern(blocks=3))})
    number = UnsizedType({"dp": V, "tp": R})
    given = (Given((5,)), Given(()))
    call = OpCall("add", given, torch.add, "add(x0, x1)")
    types = [rows.types(mesh, (5,)), number.types(mesh, ())]
    assert types[0][0]["tp"] != types[0][-1]["tp"]
    assert check_sound(PlacedCall(call, mesh, types, 1625, False, ()))


BLOCKS = CutPattern(blocks=2)
OUTER, INNER = (
    {"dp": UnsizedShard(0), "tp": UnsizedShard(0)},
    {"tp": UnsizedShard(0), "dp": UnsizedShard(0)},
)

# Operands whose pieces have the same sizes on every rank, and hold other rows.
OTHER_ROWS: list[
    tuple[str, tuple[int, ...], dict[str, UnsizedShard], dict[str, UnsizedShard]]
] = [
    ("add", (4, 4), OUTER, INNER),
    (
        "mul",
        (4, 4),
        {"tp": UnsizedShard(1), "dp": UnsizedShard(1)},
        {"dp": UnsizedShard(1), "tp": UnsizedShard(1)},
    ),
    (
        "add",
        (4, 4),
        {"dp": UnsizedShard(0), "tp": UnsizedShard(1)},
        {"dp": UnsizedShard(0, BLOCKS), "tp": UnsizedShard(1)},
    ),
    ("matmul", (4, 4), {"dp": UnsizedShard(1)}, {"dp": UnsizedShard(0, BLOCKS)}),
]


@pytest.mark.parametrize("case", range(len(OTHER_ROWS)))
def test_pieces_of_other_rows_are_not_combined(case: int) -> None:
    name, shape, left, right = OTHER_ROWS[case]
    mesh = Mesh({"dp": 2, "tp": 2})
    layouts = [
        UnsizedType({**cuts, **{axis: R for axis in mesh.axes if axis not in cuts}})
        for cuts in (left, right)
    ]
    call = OpCall(
        name, (Given(shape), Given(shape)), getattr(torch, name), f"{name}(x0, x1)"
    )
    types = [layout.types(mesh, shape) for layout in layouts]
    assert not check_sound(PlacedCall(call, mesh, types, 0, False, ()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [n for n, op in OPS.items() if op.forgets and op.forgets != OWN_COUNT]
)
def test_an_op_that_may_forget_does(name: str) -> None:
    """A reason to forget where nothing is forgotten would hide what is."""

    def is_forgotten(placed: PlacedCall) -> bool:
        try:
            held = placed.locals()
        except InvalidCallError:
            return False
        given = [t.letter for types in placed.types for t in types[0].types]
        ranks, error = run_each_rank(placed, held)
        return (
            error is None
            and "V" not in given
            and any(t.letter == "V" for found in ranks[0].types for t in found.types)
        )

    options = settings(max_examples=2000, database=None, phases=[Phase.generate])
    find(placed_calls(name=name), is_forgotten, settings=options)


@pytest.mark.parametrize("name", [n for n, op in OPS.items() if op.forgets == OWN_COUNT])
def test_a_count_of_own_rows_may_be_compared_with_zero(name: str) -> None:
    """Drawn calls compare tensors, so that the one comparison that forgets stands here."""
    compare = getattr(torch.Tensor, name)
    with set_current_mesh({"a": 2}), typecheck():
        count = assert_type(torch.tensor([1, 0, 2]), {"a": S(0)}).count_nonzero()
        assert type_of(count) == {"a": P}
        assert type_of(compare(count, 0)) == {"a": V}
        with pytest.raises(PlacementError):
            compare(count, 1)


def test_a_law_that_accepted_nothing_fails() -> None:
    with pytest.raises(AssertionError, match="no call was accepted"):
        require_accepted("exp", Tally(tried=50))
