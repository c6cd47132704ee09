"""The torch that the project is developed with; pages about peers are measured on it."""

import re
from pathlib import Path

import pytest
import torch

_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
_FOUND = re.search(r"^torch==(\S+)$", _CONSTRAINTS.read_text(), re.MULTILINE)
assert _FOUND is not None
PINNED = _FOUND.group(1)

IS_PINNED = torch.__version__.partition("+")[0] == PINNED

on_pinned_torch = pytest.mark.skipif(
    not IS_PINNED, reason=f"the page says what DTensor of torch {PINNED} does"
)
