"""spmd_types and DTensor on the same programs: each disagreement is a row of the table."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placements.interop.differences import DIFFERENCES
from placements.interop.disagreements import Disagreement, disagreement, explain
from placements.interop.fake_world import fake_world
from placements.interop.judged import draw_judged
from placements.interop.reference import check_on_ranks
from placements.interop.report import Survey, markdown, peers, survey
from placements.interop.vocabulary import move_of
from placements.runtime.declared import declared
from placements.testing.programs import Input, Program, Statement
from placements.types.axis import AxisType, I, P, R, S, V
from placements.types.mesh import Mesh
from tests.support.pinned import on_pinned_torch

PAGE = Path(__file__).parents[3] / "docs" / "differences.md"


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with fake_world():
        yield


@pytest.fixture(scope="module")
def surveyed(world: None) -> Survey:
    return survey()


def test_every_disagreement_on_one_axis_is_known(surveyed: Survey) -> None:
    assert not surveyed.unknown, f"{len(surveyed.unknown)}, first:\n{surveyed.unknown[0]}"


@pytest.mark.parametrize("key", [row.key for row in DIFFERENCES])
def test_every_row_is_seen(surveyed: Survey, key: str) -> None:
    assert surveyed.found.get(key), f"no program shows {key!r}"


def test_keys_are_different() -> None:
    keys = [row.key for row in DIFFERENCES]
    assert len(keys) == len(set(keys))


@on_pinned_torch
def test_the_page_is_generated(surveyed: Survey) -> None:
    assert PAGE.read_text() == markdown(surveyed), (
        "run: python -m placements.interop.compare --markdown > docs/differences.md"
    )


def test_what_we_accept_and_a_peer_does_not_is_sound(surveyed: Survey) -> None:
    found = [each for row in surveyed.found.values() for each in row]
    sound = [
        check_on_ranks(each.judged.program, each.judged.types) for each in _ours(found)
    ]
    assert len(sound) > 50
    assert all(sound), "a case without a finite result shows nothing"


def _ours(found: list[Disagreement]) -> list[Disagreement]:
    """Those that we accept, each program once."""
    return list(
        {str(each.judged.program): each for each in found if each.ours.accepted}.values()
    )


@settings(max_examples=2 * settings().max_examples)
@given(st.data())
def test_generated_programs_disagree_only_where_it_is_known(data: st.DataObject) -> None:
    judged = draw_judged(lambda options: data.draw(st.sampled_from(list(options))))
    for engine in peers():
        found = disagreement(engine, judged)
        if found is None:
            continue
        assert explain(engine, found), f"not in the table of differences:\n{found}"
        if found.ours.accepted:
            check_on_ranks(found.judged.program, found.judged.types)


MESH = Mesh({"tp": 2})


@pytest.mark.parametrize(
    ("types", "statement", "claimed"),
    [
        ({"tp": S(0)}, Statement("x0.sum()"), {"tp": R}),
        ({"tp": S(0)}, Statement("x0.sum(0)"), {"tp": V}),
        ({"tp": R}, Statement("-x0"), {"tp": P}),
        ({"tp": S(0)}, Statement("x0.mT"), {"tp": S(0)}),
        ({"tp": P}, move_of("all_reduce", 0, "tp", P, R), {"tp": I}),
        ({"tp": I}, move_of("convert", 0, "tp", I, R), {"tp": I}),
    ],
    ids=lambda each: str(getattr(each, "text", each)),
)  # fmt: skip
def test_a_wrong_type_is_found(
    types: dict[str, AxisType], statement: Statement, claimed: dict[str, AxisType]
) -> None:
    """The check of soundness has teeth: each claim is false, the last two of gradients."""
    program = Program(MESH, (Input((4, 4), tuple(types.items())),), (statement,))
    mesh = program.mesh
    said = [program.inputs[0].type_on(mesh), declared(mesh, claimed, (2, 2, 2))]
    with pytest.raises(AssertionError):
        check_on_ranks(program, said)


def test_an_outer_cut_is_forgotten_with_the_inner_one() -> None:
    """What the ranks of tp hold, for one place on dp, is no run of rows any more."""
    inputs = (
        Input((4, 4), (("dp", V), ("tp", R))),
        Input((4, 4, 4), (("tp", S(0)), ("dp", S(0)))),
    )
    statement = Statement("x1 + x0", "{a} + {b}")
    program = Program(Mesh({"dp": 2, "tp": 2}), inputs, (statement,))
    mesh = program.mesh
    operands = [one.type_on(mesh) for one in inputs]
    assert check_on_ranks(
        program, [*operands, declared(mesh, {"dp": V, "tp": V}, (1, 4, 4))]
    )
    with pytest.raises(AssertionError, match="is said to be"):
        check_on_ranks(program, [*operands, declared(mesh, {"dp": R, "tp": R}, (1, 4, 4))])
