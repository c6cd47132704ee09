"""Silencing, places, and texts that cannot be judged."""

from pathlib import Path

import pytest

from spmd_moe.lint.look import look_at_file, look_at_text
from spmd_moe.lint.record import Finding, Unread

HEAD = "from torch.distributed.tensor import DTensor, Shard\n"


def findings(text: str) -> list[Finding]:
    said = look_at_text(HEAD + text, "model.py")
    assert not isinstance(said, Unread), said
    return said


CALL = "DTensor.from_local(y, mesh, [Shard(0)])"


@pytest.mark.parametrize(
    "text",
    [
        f"x = {CALL}  # placements: ok (always even)\n",
        f"x = {CALL}  # noqa: E501  # placements: ok (even)\n",
        f"x = (  # placements: ok (always even)\n    1,\n    {CALL},\n)\n",
        f"x = (\n    1,\n    {CALL},  # placements: ok (always even)\n)\n",
    ],
)
def test_a_comment_with_a_reason_silences(text: str) -> None:
    assert findings(text) == []


@pytest.mark.parametrize(
    "text",
    [
        f"x = {CALL}  # placements: ok\n",
        f"x = {CALL}  # placements: ok ()\n",
        f"x = {CALL}  # placements: ok because it is\n",
    ],
)
def test_without_a_reason_it_does_not_and_says_so(text: str) -> None:
    (one,) = findings(text)
    assert "gives no reason in parentheses" in one.why


def test_a_comment_elsewhere_or_in_a_string_does_not_silence() -> None:
    text = f"# placements: ok (above)\nx = {CALL}; y = '# placements: ok (text)'\n"
    (one,) = findings(text)
    assert "gives no reason" not in one.why


def test_a_finding_says_where_what_and_how_to_mend_it() -> None:
    (one,) = findings(f"if True:\n    größe = 'ß', {CALL}\n")
    assert (one.path, one.line, one.column) == ("model.py", 3, 18)
    assert one.code == f"größe = 'ß', {CALL}"
    assert one.placements.startswith("assert_type(y, ")
    assert one.spmd_types.startswith("spmd.assert_type(y, ")
    assert one.page == "docs/migrate/uneven_sequences.md"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"import torch.distributed\nx.to_local(\n", "does not parse"),
        (b"import torch.distributed\nx.to_local()\0\n", "does not parse"),
        (
            b"# torch.distributed\nx.to_local() + " + b"(" * 300 + b")" * 300,
            "does not parse",
        ),
        (b"# torch.distributed\nx = " + b"-" * 20_000 + b"y.to_local()", "does not parse"),
        (b"# torch.distributed \xff\nx.to_local()\n", "is no text in its encoding"),
        (b"# coding: nonsense\nx.to_local()\n", "is no text in its encoding"),
    ],
)
def test_what_cannot_be_judged_is_said(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "model.py"
    file.write_bytes(content)
    said = look_at_file(file)
    assert isinstance(said, Unread) and said.why.startswith(why), said


def test_other_encodings_are_read(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_bytes(f"# coding: latin-1\n{HEAD}ä = {CALL}\n".encode("latin-1"))
    said = look_at_file(file)
    assert not isinstance(said, Unread) and [one.column for one in said] == [5]


def test_nothing_is_imported_or_run(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(f"{HEAD}raise SystemExit(9)\nimport nowhere\nx = {CALL}\n")
    said = look_at_file(file)
    assert not isinstance(said, Unread) and len(said) == 1
