"""`--mesh`: what can be read, and one line for what cannot."""

import pytest

from spmd_moe import Parallel
from spmd_moe.checks.errors import BadInput
from spmd_moe.cli.degrees import parse_parallel, print_parallel


@pytest.mark.parametrize(
    ("text", "parallel"),
    [
        ("", Parallel()),
        ("dp=1", Parallel()),
        ("dp=2,tp=2,ep=2,sp=on", Parallel(dp=2, tp=2, ep=2, sequence_parallel=True)),
        ("cp=4,tp=2,ep=4,etp=2,", Parallel(cp=4, tp=2, ep=4, etp=2)),
    ],
)
def test_degrees_are_read_and_printed_again(text: str, parallel: Parallel) -> None:
    assert parse_parallel(text) == parallel
    assert parse_parallel(print_parallel(parallel)) == parallel


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pp=2", "'pp' is no axis"),
        ("tp", "tp is ''"),
        ("tp=two", "tp is 'two'; give a whole number"),
        ("tp=0", "at least 1"),
        ("tp=-1", "at least 1"),
        ("tp=1.5", "at least 1"),
        ("tp=2,tp=2", "tp is given twice"),
        ("sp=on,sp=off", "sp is given twice"),
        ("sp=1", "give sp=on or sp=off"),
        ("tp=2,ep=3", "ep (3) must divide"),
        ("tp=4,ep=2,etp=2", "etp (2) must be 1 or equal to tp (4)"),
    ],
)
def test_what_cannot_be_read_is_one_line(text: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_parallel(text)
    assert said in str(caught.value) and text in str(caught.value)
    assert "\n" not in str(caught.value)
