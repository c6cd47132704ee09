"""The law of call forms: every way to call an op is accepted and true, or refused."""

from placements.testing.forms.report import Failure as Failure
from placements.testing.forms.report import Report as Report
from placements.testing.forms.report import Tally as Tally
from placements.testing.forms.report import run as run
