"""The tables of this package as pages: for `python -m placements rules` and docs/.

Nothing is said here that the tables do not say.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from placements.checker.backward import LOSSES
from placements.inference.op import ROLES, SUM, Row, parsed_slots
from placements.inference.ops import COMPOSED, ROWS
from placements.inference.rules import (
    DIM_REASONS,
    DRAWS,
    PARTIAL_PLUS_NUMBER,
    RULES,
    Linearity,
    Rule,
    join,
)
from placements.inference.transitions import TRANSITIONS, dual_transition
from placements.types.axis import BY_LETTER, REASONS, WORDS, Shard, dual


@dataclass(frozen=True)
class Page:
    """One table: a title, a sentence, a head and rows of text."""

    title: str
    about: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def pages() -> list[Page]:
    """Return every table, in reading order."""
    return [
        _types(),
        *_grids(),
        _joins(),
        _dims(),
        _roles(),
        *_ops(),
        _composed(),
        _draws(),
        _transitions(),
        _losses(),
    ]


def _types() -> Page:
    rows = [
        (word, letter, dual(BY_LETTER.get(letter, Shard(0))).letter, REASONS[letter])
        for letter, word in WORDS.items()
    ]
    about = "The gradient of a value of a type has the type in the third column."
    return Page("Types", about, ("type", "printed", "gradient", "why"), rows)


# linearity -> an op of two operands that everybody knows
_FOR_EXAMPLE = {
    Linearity.LINEAR: "`a + b`",
    Linearity.MULTILINEAR: "`a * b`, `a @ b`",
    Linearity.NONLINEAR: "`maximum(a, b)`",
}


def _grids() -> list[Page]:
    """Return what two operands give on one axis, at a glance."""
    pages: list[Page] = []
    for linearity, example in _FOR_EXAMPLE.items():
        rows = [
            (f"**{a}**", *(join(linearity, (a, b)).gives or "refused" for b in _LETTERS))
            for a in _LETTERS
        ]
        about = f"For example {example}: a down, b across. The reasons are below."
        title = f"What two operands give: {linearity.value} ops"
        pages.append(Page(title, about, ("", *_LETTERS), rows))
    return pages


_LETTERS = tuple(WORDS)


def _operands(rule: Rule) -> str:
    text = f"has {rule.has}" if rule.has else "any"
    if set(rule.only) != set("RIVSP"):
        text += f", only {' '.join(rule.only)}"
    if rule.at_most_partials is not None:
        text += f", at most {rule.at_most_partials} P"
    if set(rule.values) != set("RIVSP"):
        text += f"; values only {' '.join(rule.values)}"
    if set(rule.controls) != set("RIVSP"):
        text += f"; controls only {' '.join(rule.controls)}"
    return text


def _joins() -> Page:
    rows = [
        (
            rule.linearity.value if rule.linearity else "any op",
            _operands(rule) + (" and a number" if rule is PARTIAL_PLUS_NUMBER else ""),
            rule.gives or f"refused ({rule.kind})",
            rule.reason,
        )
        for rule in (*RULES, PARTIAL_PLUS_NUMBER)
    ]
    about = (
        "On one axis. The first row that fits holds. Controls are operands that choose or "
        "divide (indices, masks, divisors); a contraction over a cut dim counts as one P."
    )
    return Page("How types combine", about, ("op", "operands", "gives", "why"), rows)


def _dims() -> Page:
    about = "Refused whatever the op, where a dim is cut and the operands disagree on it."
    return Page("Cut dims", about, ("case", "why"), list(DIM_REASONS.items()))


def _roles() -> Page:
    about = (
        "A call is bound to torch's own signature first, so it does not matter how an "
        "argument is given. A tensor, or a number that belongs to an axis, in a slot whose "
        "role does not take it is refused, and so is an argument in a slot that the row "
        "of the op does not name. `input/A`: forms of the op have several names for a slot."
    )
    return Page("What a slot of a call is", about, ("role", "what it takes"),
                list(ROLES.items()))  # fmt: skip


def _slots(text: str) -> str:
    """`value input/A; dim dim` -> `value: input/A; dim: dim`, each role once."""
    by_role: dict[str, list[str]] = {}
    roles, others = parsed_slots(text)
    for slot, role in roles.items():
        names = "/".join([slot, *(other for other, own in others.items() if own == slot)])
        by_role.setdefault(role, []).append("every slot" if slot == "*" else names)
    return "; ".join(f"{role}: {', '.join(slots)}" for role, slots in by_role.items())


def _facts(row: Row) -> tuple[str, ...]:
    """The group of a row, and what the page says of its ops."""
    along = "the result is Partial" if row.along == SUM else row.along
    if row.forgets:
        along = f"may become Varying: {row.forgets}"
    return row.group, row.linearity.value, _slots(row.slots), row.why, along or "-"


def _ops() -> list[Page]:
    groups: dict[str, list[tuple[str, ...]]] = {}
    for facts, alike in groupby(ROWS, _facts):  # rows that differ by their flow only
        names = ", ".join(name for row in alike for name in row.names.split())
        groups.setdefault(facts[0], []).append((names, *facts[1:]))
    head = ("ops", "is", "slots", "why", "along a cut dim")
    about = "In-place forms follow the same row and keep the type of what they write."
    return [Page(f"Ops: {group}", about, head, rows) for group, rows in groups.items()]


def _composed() -> Page:
    about = (
        "Functions of torch in Python that are made of the ops above. The checker looks "
        "into them and judges each op by itself; so it does with those of torch.nn.init."
    )
    rows = [(name,) for name in sorted(COMPOSED)]
    return Page("Functions made of ops", about, ("function",), rows)


def _draws() -> Page:
    rows = [
        (WORDS[d.letter], "yes" if d.shared else "no", d.gives or "refused", d.reason)
        for d in DRAWS
    ]
    about = "Random masks, by whether the ranks of the axis share a generator."
    return Page("Random ops", about, ("value", "shared", "gives", "why"), rows)


def _transitions() -> Page:
    rows: list[tuple[str, ...]] = []
    for row in TRANSITIONS:
        back = dual_transition(row)
        backward = f"{back.call} {back.src} -> {back.dst}"
        sent = f"{row.communicates or '-'} / {back.communicates or '-'}"
        rows.append((row.call, f"{row.src} -> {row.dst}", row.meaning, backward, sent))
    head = ("call", "types", "what it gives", "backward", "sends forward / backward")
    return Page("Collectives and casts", "`f(x, axis, src=..., dst=...)`", head, rows)


def _losses() -> Page:
    rows: list[tuple[str, ...]] = []
    for letter, verdict in LOSSES.items():
        if verdict is None:
            rows.append((WORDS[letter], "accepted", "its gradient is 1.0 on every rank"))
        else:
            reason, call, dst = verdict
            rows.append((WORDS[letter], f"refused; {call} to {dst}", reason))
    return Page(
        "backward() on a loss", "By the type of the loss.", ("loss", "", "why"), rows
    )


def markdown() -> str:
    """Return all pages as the text of docs/rules.md."""
    parts = [
        "# Rules",
        "Generated by `python -m placements rules --markdown`; do not edit by hand.",
    ]
    for page in pages():
        parts += [f"## {page.title}", page.about, _markdown_table(page)]
    return "\n\n".join(parts) + "\n"


def _markdown_table(page: Page) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "|" + "---|" * len(page.head)
    return "\n".join([line(page.head), rule, *(line(row) for row in page.rows)])
