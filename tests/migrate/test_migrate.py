"""Every version of every pattern computes what one device does; the pages are what was run."""

import re

import pytest

from placements import rulebook
from placements.interop.spmd_types import SpmdTypes
from tests.migrate.judge import (
    GLOBAL,
    LOCAL,
    PLAIN,
    TYPES,
    VERIFY,
    adjoint_verdict,
    difference,
    run,
    verdicts,
)
from tests.migrate.page import page, summary_row
from tests.migrate.patterns import (
    BEFORE,
    FOLDER,
    NAMES,
    OURS,
    PEER,
    ROOT,
    VERSIONS,
    pattern,
)
from tests.support.pinned import IS_PINNED

CHECKED = {BEFORE: (PLAIN,), OURS: (PLAIN, TYPES, VERIFY), PEER: (PLAIN, LOCAL, GLOBAL)}
GUIDE = ROOT / "docs" / "migrate"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_equals_one_device(name: str, version: str) -> None:
    one = pattern(name)
    for by in CHECKED[version]:
        if by in one.unchecked and IS_PINNED:
            with pytest.raises(SpmdTypes.refusals):
                run(one, one.program(version), version, by)
        elif by not in one.unchecked:
            assert difference(one, run(one, one.program(version), version, by)) is None, by
    assert adjoint_verdict(one, version, one.program(version)).said in ("passes", "-")


@pytest.mark.parametrize("name", NAMES)
def test_the_wrong_version_is_wrong_and_found(name: str) -> None:
    found = {by: verdict.said for by, verdict in verdicts(name).items()}
    assert found[TYPES] == "refuses" or found[VERIFY] == "refuses", found
    assert "accepts; it is right here" not in found.values(), found


@pytest.mark.skipif(not IS_PINNED, reason="DTensor is part of torch, and judges otherwise")
@pytest.mark.parametrize("name", NAMES)
def test_the_page_is_made_from_the_files(name: str) -> None:
    assert (GUIDE / f"{name}.md").read_text() == page(name), "run: make docs"
    assert summary_row(name) in (GUIDE / "README.md").read_text(), "run: make docs"


def test_the_first_page_lists_what_is_there() -> None:
    text = (GUIDE / "README.md").read_text()
    listed = re.findall(r"^\| \[\w[^\]]*\]\((\w+)\.md\) \|", text, re.M)
    assert tuple(listed) == NAMES * 2  # the bugs, and who finds them
    assert {f.name for f in FOLDER.iterdir() if f.is_dir()} - {"__pycache__"} == set(NAMES)
    assert {f.stem for f in GUIDE.glob("*.md")} == {"README", *NAMES}


def test_what_the_functions_of_megatron_become_sends_as_much() -> None:
    rows = re.findall(
        r"\| ([^|]+ / [^|]+) \| `(\w+)\(x, \"\w+\", src=(\w)[^,]*, dst=(\w)",
        (GUIDE / "README.md").read_text(),
    )
    assert len(rows) == 9
    for sent, call, src, dst in rows:
        rule = rf"^\| {call} \| {src} -> {dst} \|.*\| {sent} \|$"
        assert re.search(rule, rulebook.markdown(), re.M), (call, src, dst)
