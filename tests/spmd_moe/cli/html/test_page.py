"""The page of `spmd-moe check --html`: it has all that was found, and stands alone."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from spmd_moe.cli.check_rows import shape_text
from spmd_moe.cli.html.style import DARK, LIGHT, PAIRS
from spmd_moe.cli.main import main
from spmd_moe.cli.tables import size
from tests.support.browser import measured

# Elements of HTML without an end.
VOID = {"meta", "input", "br", "hr", "img"}


class Page(HTMLParser):
    """The text, ids and addresses of a page; what is not closed is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.refers: list[str] = []
        self.asks: list[str] = []  # what a browser would fetch
        self.headings: list[int] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        assert len(given) == len(attrs), (tag, attrs)
        if "id" in given:
            self.ids.append(given["id"])
        self.refers += given.get("aria-labelledby", "").split()
        self.refers += re.findall(r"url\(#([^)]+)\)", given.get("marker-end", ""))
        self.asks += [given[name] for name in ("src", "href", "srcset") if name in given]
        assert tag not in ("script", "link", "iframe", "object"), tag
        if tag == "svg":
            assert given["role"] == "img"
            assert given.get("aria-label") or given.get("aria-labelledby")
        if re.fullmatch(r"h\d", tag):
            self.headings.append(int(tag[1]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words += f"{data}\n"


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, dict[str, Any]]:
    """The page and the report for programs, of one run."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("builtins.print", lambda *text, **_: said.extend(map(str, text)))
        assert main(["check", "--json", "--html", str(path)]) == 0
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    return path.read_text(), json.loads("".join(said))


def test_it_is_whole_and_asks_for_nothing(made: tuple[str, dict[str, Any]]) -> None:
    text, _ = made
    page = Page(text)
    assert len(set(page.ids)) == len(page.ids)
    assert set(page.refers) <= set(page.ids) and page.refers
    assert page.asks == [] and "@import" not in text and "url(http" not in text
    assert page.headings[0] == 1 and page.headings.count(1) == 1
    deeper = [b - a for a, b in zip(page.headings, page.headings[1:], strict=False)]
    assert max(deeper) == 1, "a level of headings is left out"


def test_it_has_every_collective_and_number(made: tuple[str, dict[str, Any]]) -> None:
    text, report = made
    sections = re.split(r'<section class="configuration"', text)[1:]
    assert len(sections) == len(report["checks"]) == 6
    for section, check in zip(sections, report["checks"], strict=True):
        assert f">{check['configuration']} (" in section
        narrow, wide, table = (
            section[section.index(start) : section.index(end)]
            for start, end in (
                ('<svg class="diagram narrow"', '<svg class="diagram wide"'),
                ('<svg class="diagram wide"', "<figcaption>"),
                ("<table", "</table>"),
            )
        )
        sent = check["collectives"]
        for way, label in ((False, "forward: "), (True, "backward: ")):
            wanted = sorted(
                f"{e['collective']} {e['axis']} {size(e['bytes'])}"
                for e in sent
                if e["backward"] == way
            )
            for drawn in (narrow, wide):
                found = re.findall(rf'<text class="\w+"[^>]*>{label}([^<]+)<', drawn)
                assert sorted(found) == wanted, check["configuration"]
            lines = [line for cell in re.findall(r"<td>([^<]*)</td>", table)
                     for line in cell.split("\n") if line]  # fmt: skip
            arrow = "&lt;- " if way else ""
            for one in wanted:
                assert f"{arrow}{one}" in lines
        axes = {entry["axis"] for entry in check["gradient_sums"]}
        assert axes == set(re.findall(r">all-reduce (\w+) [^<]+</text>", narrow))
        for row in check["crossings"]:
            if row["gradient"] and row["role"] == "parameter":
                assert f">{row['name']} {shape_text(row['local_shape'])}</text>" in narrow
        rows = check["simulated"]["rows"]
        for rank, counts in enumerate(rows):
            held = [n for n in counts if n is not None]
            assert f"<h4>rank {rank}: {sum(held)} rows</h4>" in section
            said = re.findall(rf'aria-label="rows on rank {rank}: ([^"]+)"', section)
            listed = [f"expert {e}: {n}" for e, n in enumerate(counts) if n is not None]
            assert said == [", ".join(listed)]
        work, model = check["simulated"]["work"], check["simulated"]["model"]
        slots = work["batch"] * work["seq"] * model["top_k"] * check["parallel"]["dp"]
        per_rank = sum(n for counts in rows for n in counts if n is not None)
        copies = check["parallel"]["tp"] if check["parallel"]["ep"] == 1 else 1
        copies = max(copies, check["parallel"]["etp"])
        assert per_rank == slots * copies, (
            "every slot is computed, on each rank that cuts it"
        )
    for name in report["checks"][0]["simulated"]["differences"]:
        assert name in text
    assert "convert(x_TD, &#x27;tp&#x27;, src=I, dst=R)" in text


def test_in_a_browser_nothing_is_wider_than_the_window(
    made: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    phone, desktop = measured(made[0], [360, 1200], tmp_path, dark=True)
    ground = f"rgb({', '.join(str(int(DARK['ground'][k : k + 2], 16)) for k in (1, 3, 5))})"
    for found, drawn in ((phone, "narrow"), (desktop, "wide")):
        assert found["ground"] == ground
        assert len(found["widths"]) == 6
        for number, shown in enumerate(found["widths"]):
            assert shown["width"] <= found["window"], shown
            assert shown["sections"] == [f"configuration{number}"]
            assert shown["diagrams"] == [f"diagram {drawn}"]
    wide = made[0].replace("<main>", '<main><div style="width:400px">x</div>')
    (wider,) = measured(wide, [360], tmp_path, dark=False)
    assert wider["widths"][0]["width"] > wider["window"] == 360
    assert wider["ground"] == "rgb(255, 255, 255)"


def test_edges_are_those_of_the_program(made: tuple[str, dict[str, Any]]) -> None:
    _, report = made
    rows = report["checks"][0]["crossings"]
    by_name = {row["name"]: row for row in reversed(rows)}
    names = lambda row: [rows[k]["name"] for k in row["sources"]]  # noqa: E731
    assert names(by_name["combine()"]) == ["weigh()", "collect_finish()"]
    weights = ["w1_HD", "w3_HD", "w2_DH"]
    assert names(by_name["SharedExperts()"]) == ["redistribute(x_TD)", *weights]
    assert names(by_name["redistribute(x_TD)"]) == ["x_TD"]
    assert by_name["choose()"]["sources"] == [], "integers are in no graph"


def test_text_of_the_user_is_escaped(tmp_path: Path) -> None:
    from spmd_moe.cli.html.page import layer_page, module_page

    evil = "<script>alert('a & b')</script>\"'"
    for text in (
        module_page(evil, evil, [], [evil], evil),
        layer_page(evil, evil, [], left_out=[evil], refused=evil, failure=evil),
    ):
        assert "<script" not in text and Page(text).words.count(evil) >= 4


def test_a_failing_module_has_a_page_with_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.html"
    module = "tests.support.own_modules"
    assert main(["check", "--module", f"{module}.ForgotConvert", "--html", str(path)]) == 1
    error = capsys.readouterr().err.splitlines()[0]
    assert error in Page(path.read_text()).words
    assert main(["check", "--module", f"{module}.MLP", "--html", str(path)]) == 0
    page = Page(path.read_text()).words
    assert "all-reduce tp" in page and "no configurations" in page and "Failed" not in page


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("", "that is a directory"),
        ("gone/report.html", "there is no directory"),
        ("file/report.html", "there is no directory"),
    ],
)
def test_a_bad_path_is_told_before_the_work(
    place: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("spmd_moe.cli.check.check_layer", None)  # is not reached
    assert main(["check", "--html", str(tmp_path / place)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_meshes_have_no_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--compare-meshes", "--html", "report.html"]) == 2
    assert "--html does not go with --compare-meshes" in capsys.readouterr().err


def luminance(colour: str) -> float:
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_stands_out_from_its_ground(colours: dict[str, str]) -> None:
    for text, ground in PAIRS:
        dark, light = sorted(luminance(colours[name]) for name in (text, ground))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground)
