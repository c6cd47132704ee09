"""The law of call forms: every way to call an op is accepted and true, or refused by name.

signatures  which ways torch offers to call an op
operands    global values, their types, and what each rank holds
draw        a line of Python with operands and types
judge       the line on one device against the same line on every rank
report      many forms of many ops, counted

It shares no code with the inference: what a type means is `split` and `join`, and what a
line means is what it does on one device.
"""

from placements.testing.forms.report import Failure as Failure
from placements.testing.forms.report import Report as Report
from placements.testing.forms.report import Tally as Tally
from placements.testing.forms.report import run as run
