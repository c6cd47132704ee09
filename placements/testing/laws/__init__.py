"""Laws: what must hold for every row of every table, and functions that check it.

README.md says what each law is.
"""

from placements.testing.laws.decided import check_decided as check_decided
from placements.testing.laws.draws import check_draw as check_draw
from placements.testing.laws.kept_numbers import is_kept as is_kept
from placements.testing.laws.lockstep import check_lockstep as check_lockstep
from placements.testing.laws.loss_types import check_loss as check_loss
from placements.testing.laws.padding_ignored import check_padding as check_padding
from placements.testing.laws.precise import check_precise as check_precise
from placements.testing.laws.short_programs import check_program as check_program
from placements.testing.laws.sound import check_sound as check_sound
from placements.testing.laws.tight import is_refuted as is_refuted
from placements.testing.laws.transitions_kept import check_transition as check_transition
