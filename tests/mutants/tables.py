"""Every mutant. Rows are taken from the tables themselves, so a new row has its mutants
without a change here; what is written out in `of_*` are changes of formulas.
"""

from tests.mutants.mutant import Mutant
from tests.mutants.of_columns import of_columns
from tests.mutants.of_dims import of_dims
from tests.mutants.of_extents import of_extents
from tests.mutants.of_gradients import of_duals, of_losses
from tests.mutants.of_moves import of_backwards, of_transitions
from tests.mutants.of_ops import of_along, of_linearities
from tests.mutants.of_roles import of_roles
from tests.mutants.of_rules import of_draws, of_rules

MAKERS = (
    of_rules, of_dims, of_draws, of_duals, of_losses, of_transitions, of_backwards,
    of_extents, of_linearities, of_along, of_columns, of_roles,
)  # fmt: skip


def mutants() -> list[Mutant]:
    """All of them, table by table."""
    found = [mutant for make in MAKERS for mutant in make()]
    assert len({m.name for m in found}) == len(found), "two mutants of one name"
    return found
