"""The law of call forms: every way to call an op is accepted and true, or refused."""

from placements.testing.forms.report import FormFailure as FormFailure
from placements.testing.forms.report import FormTally as FormTally
from placements.testing.forms.report import Report as Report
from placements.testing.forms.report import run as run
