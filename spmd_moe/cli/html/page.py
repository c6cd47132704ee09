"""Put the page together: one file, which needs no network and no script.

The choice of a configuration is a row of radio buttons and a rule of CSS. A browser that
does not know `:has()`, and a printer, show all configurations one below the other.
"""

from collections.abc import Iterable, Sequence
from html import escape

from placements.runtime.ledger import Entry
from spmd_moe.checks.configurations import Result
from spmd_moe.checks.crossings import Crossing
from spmd_moe.checks.refused import STORY
from spmd_moe.cli.check_rows import (
    BYTES_TITLE,
    CROSSINGS_LEGEND,
    GRADIENT_SUMS_LEGEND,
    bytes_table,
    differences_table,
    run_title,
    title_of,
    verdict,
)
from spmd_moe.cli.html.bars import bars
from spmd_moe.cli.html.boxes import boxes_of
from spmd_moe.cli.html.diagram import NARROW, WIDE, diagram
from spmd_moe.cli.html.elements import (
    crossings_table,
    numbers_table,
    paragraph,
    preformatted,
)
from spmd_moe.cli.html.style import COLOURS, DIAGRAM, PAGE

DIAGRAM_LEGEND = (
    "A square box is a stage, with its tensors; a round box is a collective or a cast. An "
    "edge leads from a tensor to what is computed from it, and it is thick and coloured "
    "where it leads from one mesh to the other. Shapes are those of rank 0. dp:S(0) is the "
    "type on the axis dp; R|P is the type and that of the gradient where it differs, and - "
    "stands where there is none. Bytes are what rank 0 hands to the collective."
)
ROWS_LEGEND = (
    "Tokens that each expert computed on each rank, in the run that is compared with one "
    "device. An expert that is cut over ranks has the same tokens on all of them."
)
NOT_RUN = (
    "No token was routed: the layer is too large to run here, and its trace spreads the "
    "rows evenly over the experts. --scale-down runs a small layer that is cut in the same "
    "way, if there is one."
)


def layer_page(
    headline: str,
    work: str,
    results: Sequence[Result],
    *,
    left_out: Sequence[str] = (),
    refused: str | None = None,
    failure: str | None = None,
) -> str:
    """Return the page of `spmd-moe check`; `refused` is the error of the program."""
    parts = [f"<h1>{escape(headline)}</h1>", paragraph(work, "quiet")]
    if failure is not None:
        parts += [_heading("Failed", "bad"), preformatted(failure, "the error")]
    for line in verdict(results) if results else ():
        parts.append(paragraph(line, "bad" if line.startswith("FAILED") else ""))
    parts += [paragraph(line) for line in left_out]
    names = [result.trace.configuration for result in results]
    parts += _choice(names) if len(names) > 1 else []
    for number, result in enumerate(results):
        parts += _configuration(number, result)
    if results:
        parts += _numbers(results)
    if refused is not None:
        parts += [_heading("A refused program"), paragraph(STORY)]
        parts.append(preformatted(refused, "the error of the refused program"))
    return _document(headline, parts, len(names))


def module_page(
    name: str,
    mesh: str,
    crossings: Sequence[Crossing],
    passed: Iterable[str],
    failure: str | None,
) -> str:
    """Return the page of a module; `passed` has a line for each check that it passed."""
    parts = [
        f"<h1>{escape(name)}</h1>",
        paragraph(f"on {mesh}, as rank 0 sees it", "quiet"),
    ]
    if failure is not None:
        parts += [_heading("Failed", "bad"), preformatted(failure, "the error")]
    parts += [paragraph(line) for line in passed]
    if crossings:
        parts += _diagrams("module", f"{name} on {mesh}", crossings)
        parts.append(crossings_table(crossings, f"Every tensor of {name}"))
        parts.append(paragraph(CROSSINGS_LEGEND, "quiet"))
    parts.append(
        paragraph(
            "A module has no configurations, no experts and no sums of gradients here, so "
            "this page does not show them.",
            "quiet",
        )
    )
    return _document(name, parts, 0)


def _heading(text: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f"<h2{kind}>{escape(text)}</h2>"


def _choice(names: Sequence[str]) -> list[str]:
    items = [
        f'<label><input type="radio" name="configuration" id="choose{number}"'
        f"{' checked' if number == 0 else ''}> {escape(name)}</label>"
        for number, name in enumerate(names)
    ]
    return ["<fieldset><legend>Configuration</legend>", *items, "</fieldset>"]


def _configuration(number: int, result: Result) -> list[str]:
    trace, run = result.trace, result.run
    title = title_of(trace)
    parts = [f'<section class="configuration" id="configuration{number}">']
    parts.append(_heading(title))
    parts += _diagrams(f"diagram{number}", title, trace.crossings, trace.gradient_sums)
    parts.append("<h3>Tokens for each expert</h3>")
    if run is None:
        parts.append(paragraph(NOT_RUN))
    else:
        parts += [paragraph(ROWS_LEGEND, "quiet"), bars(run.rows)]
    parts.append("<h3>Every tensor</h3>")
    parts.append(crossings_table(trace.crossings, f"Where tensors first cross, {title}"))
    return [*parts, paragraph(CROSSINGS_LEGEND, "quiet"), "</section>"]


def _diagrams(
    name: str,
    title: str,
    crossings: Sequence[Crossing],
    sums: Sequence[Entry] = (),
) -> list[str]:
    """Return the diagram in both arrangements; the style shows one of them."""
    boxes = boxes_of(crossings, sums)
    drawn = [diagram(boxes, name, where, title) for where in (NARROW, WIDE)]
    caption = f"<figcaption>{escape(DIAGRAM_LEGEND)}</figcaption>"
    return ["<figure>", *drawn, caption, "</figure>"]


def _numbers(results: Sequence[Result]) -> list[str]:
    parts = [_heading("Bytes")]
    parts.append(numbers_table(bytes_table([r.trace for r in results]), BYTES_TITLE))
    parts.append(paragraph(GRADIENT_SUMS_LEGEND, "quiet"))
    parts.append(_heading("Beside one device"))
    runs = [result.run for result in results if result.run is not None]
    if runs:
        parts.append(numbers_table(differences_table(runs), run_title(runs[0])))
    else:
        parts.append(paragraph("Nothing was run, so there is nothing to compare."))
    return parts


def _chosen(count: int) -> str:
    """Return the rules that hide every configuration but the chosen one, on a screen."""
    rules = [
        f"body:has(#choose{k}:checked) .configuration:not(#configuration{k})"
        for k in range(count)
    ]
    return f"@media screen{{{','.join(rules)}{{display:none}}}}\n" if count > 1 else ""


def _document(title: str, parts: Iterable[str], configurations: int) -> str:
    style = COLOURS + DIAGRAM + PAGE + _chosen(configurations)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>",
            "<body>\n<main>",
            *parts,
            "</main>\n</body>\n</html>\n",
        ]
    )
