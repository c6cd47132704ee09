"""Lockstep: all ranks send the same; a rank that does not is reported, with its line."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings

from placements.testing.laws.lockstep import (
    MUTATIONS,
    Mutant,
    check_lockstep,
    check_mutant,
    mutants,
    programs_with_empty_pieces,
)
from placements.testing.programs import Input, Program, Statement
from placements.testing.ranks.failures import RankFailure
from placements.types.axis import P
from placements.types.mesh import Mesh

# The mutations share the examples of a profile.
SHARE = len(MUTATIONS)


def test_ranks_send_the_same_whatever_their_values() -> None:
    sent: list[int] = []

    @given(programs_with_empty_pieces())
    def law(program: Program) -> None:
        sent.append(len(check_lockstep(program) or []))

    law()
    assert sum(count > 0 for count in sent) > len(sent) // 10, "few programs send"


class Lopsided(Program):
    """Rank 1 leaves the last statement out."""

    def values(self, inputs: Sequence[Any], names: Mapping[str, Any]) -> list[Any]:
        alone = dist.is_initialized() and dist.get_rank() == 1
        statements = self.statements[:-1] if alone else self.statements
        return Program(self.mesh, self.inputs, statements).values(inputs, names)


def lopsided(size: int) -> Lopsided:
    statements = (Statement("x0 * 2"), Statement("to(x1, 'tp', R)"))
    return Lopsided(Mesh({"tp": 2}), (Input((size, size), (("tp", P),)),), statements)


def test_a_rank_that_leaves_a_collective_out_is_found() -> None:
    with pytest.raises(RankFailure, match=r"all_reduce\(float64\[2, 2\]"):
        check_lockstep(lopsided(2))


def test_a_collective_of_nothing_that_is_left_out_is_found() -> None:
    """Nothing is sent, so nobody waits for it; but with other sizes they would."""
    with pytest.raises(
        AssertionError, match=r"rank 0 sent \(\[\('tp', 'all-reduce', False\)"
    ):
        check_lockstep(lopsided(0))


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_rank_that_does_otherwise_is_reported(mutation: str) -> None:
    @settings(max_examples=-(-settings().max_examples // SHARE))
    @given(mutants(mutation=mutation))
    def law(mutant: Mutant) -> None:
        check_mutant(mutant)

    law()
