"""The law of own rows: what takes numbers of own rows for numbers is Varying, or refused.

`torch.arange(x.shape[0])` of a cut dim counts from 0 on every rank, so it is a piece only as
an index of those rows. Forms of every op (`placements.testing.forms`) are drawn with such
numbers in the place of their tensors, and judged as all forms are.
"""

from typing import Any

import pytest

from placements.testing.forms import run
from placements.testing.forms.tensors import DrawsTensors
from tests.laws.test_call_forms import GROUPS, group

FORMS, DEEP_FORMS = 6, 100


def own_rows(draws: DrawsTensors, name: str) -> str:
    """Write the numbers of the rows of an operand, in the shape of the operand."""
    x = draws.form.operands.get(name)
    if x is None or not x.ndim or draws.rng.random() < 0.3:
        return name
    dim = draws.rng.randrange(x.ndim)
    places = ", ".join(":" if d == dim else "None" for d in range(x.ndim))
    numbers = f"torch.arange({name}.shape[{dim}])[{places}].expand_as({name})"
    as_floats = next(iter(x.values.values())).is_floating_point()
    return f"{numbers}.double()" if as_floats else numbers


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Draw forms of own rows; returns what was written into them."""
    plain, written = DrawsTensors.tensor, list[str]()

    def tensor(self: DrawsTensors, slot: Any) -> str:
        text = plain(self, slot)
        if slot.name != "out":
            text = own_rows(self, text)
            written.append(text)
        return text

    monkeypatch.setattr(DrawsTensors, "tensor", tensor)
    return written


@pytest.mark.parametrize("number", range(GROUPS))
def test_own_rows_are_no_numbers(
    number: int, drawn: list[str], request: pytest.FixtureRequest
) -> None:
    deep = request.config.getoption("--placements-profile") == "deep"
    report = run(group(number), DEEP_FORMS if deep else FORMS, seed=1)
    assert not report.failures, str(report)
    assert sum("arange" in text for text in drawn) > 100
