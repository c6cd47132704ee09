"""Laws: what must hold for every row of every table, and functions that check it.

sound         what the checker accepts computes the single-device result
total, tight  every combination has an answer; every refusal has a reason to refuse
moves         transitions keep the meaning, and their backward is the adjoint
programs      short programs: refused, or equal to one device
round_trips   print and parse, split and join, rows there and back
"""

from placements.testing.laws.moves import check_transition as check_transition
from placements.testing.laws.programs import check_program as check_program
from placements.testing.laws.sound import check_sound as check_sound
from placements.testing.laws.tight import is_refuted as is_refuted
