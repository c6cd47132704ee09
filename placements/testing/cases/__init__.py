"""How to call every op of the table: global operands, and the call itself.

`CASES` has one builder for every name in `placements.inference.ops.OPS`; a new op without
a builder fails the laws. Builders know shapes and values, and nothing of types or ranks.
"""

from placements.testing.cases.build import Builder as Builder
from placements.testing.cases.build import Given as Given
from placements.testing.cases.build import OpCall as OpCall
from placements.testing.cases.table import CASES as CASES
from placements.testing.cases.table import NOT_CALLED as NOT_CALLED
from placements.testing.cases.table import call_names as call_names
from placements.testing.cases.table import calls as calls
