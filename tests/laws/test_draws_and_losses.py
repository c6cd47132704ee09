"""Random masks by type and generator; where backward may start."""

import pytest

from placements.inference.rules import DRAWS, Draw
from placements.testing.laws.draws import check_draw
from placements.testing.laws.loss_types import MADE_OF, check_loss


@pytest.mark.parametrize("row", DRAWS, ids=lambda r: f"{r.letter}-{r.shared}")
def test_a_draw_is_one_mask_of_the_whole_value(row: Draw) -> None:
    check_draw(row.letter, row.shared)


@pytest.mark.parametrize("letter", MADE_OF)
def test_backward_starts_at_one_number_and_is_its_gradient(letter: str) -> None:
    check_loss(letter)
