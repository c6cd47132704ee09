"""The page docs/models.md: which models pass in which settings, and why the others do not."""

from collections import defaultdict

import transformers

from tests.models.architectures import (
    DECODERS,
    ENCODER_DECODERS,
    ENCODERS,
    EXPERTS,
    RECURRENT,
    SPEECHES,
    VISION,
)
from tests.models.explained import EXPLAINED
from tests.models.judge import ABSENT, FALSE, NO_SUM, PASSED, REFUSED, Setting, Verdict

KINDS = {
    "Decoders": DECODERS,
    "Mixtures of experts": EXPERTS,
    "Encoders": ENCODERS,
    "Encoder-decoders": ENCODER_DECODERS,
    "Vision": VISION,
    "Speech": SPEECHES,
    "State space and recurrent": RECURRENT,
}
_MARKS = {PASSED: "yes", REFUSED: "refused", FALSE: "FALSE", ABSENT: "-", NO_SUM: "no sum"}

_HEAD = """# Real models under typecheck()

Written by `make models-page`; `make test-models` checks it. Each model is the unmodified one of `transformers` {version} with a
tiny config and drawn weights, otherwise with its default config (dropout as it comes). It runs forward and backward on
`{{"dp": 4}}`: inputs `S(0)` or `V`, and every parameter and buffer declared by one line, `declare(model, {{"*": {{"dp": R}}}})`.

"yes" means that every op was accepted on every rank, and that every result with a type other than Varying, and the
gradient of every parameter, joined over the ranks as its type says, is what one device computes in the same step.
"-" means that the model itself does not have the setting: it has no sdpa attention, or one device cannot run it
either. "no sum" means that every op was accepted and every type is true, but the results of the ranks, which are
Varying, do not add up to that of one device: the model looks across the batch, so that nobody may declare their sum.
"""


def page(verdicts: list[Verdict]) -> str:
    """Return the page as markdown."""
    settings = list(dict.fromkeys(v.setting for v in verdicts))
    by = {(v.model, v.setting): v for v in verdicts}
    lines = [_HEAD.format(version=transformers.__version__), *_counts(verdicts, settings)]
    for kind, architectures in KINDS.items():
        names = [a.name for a in architectures if (a.name, settings[0]) in by]
        if not names:
            continue
        head = " | ".join(_heading(s) for s in settings)
        lines += [
            "",
            f"## {kind}",
            "",
            f"| model | {head} |",
            "|---" * (len(settings) + 1) + "|",
        ]
        for name in names:
            marks = " | ".join(_MARKS[by[name, s].outcome] for s in settings)
            lines.append(f"| {name} | {marks} |")
    return "\n".join([*lines, *_refusals(verdicts)])


def _heading(setting: Setting) -> str:
    kind = "S(0)" if setting.kind == "S" else "V"
    return f"{kind} {setting.attention} {setting.mode}"


def _counts(verdicts: list[Verdict], settings: list[Setting]) -> list[str]:
    lines = [
        "| setting | passed | refused | no sum | false | does not have it | results compared |",
        "|---" * 7 + "|",
    ]
    for setting in settings:
        of = [v for v in verdicts if v.setting == setting]
        counts = " | ".join(
            str(sum(v.outcome == o for v in of))
            for o in (PASSED, REFUSED, NO_SUM, FALSE, ABSENT)
        )
        lines.append(f"| {_heading(setting)} | {counts} | {sum(v.compared for v in of)} |")
    for kind, name in (("S", "S(0)"), ("V", "V")):
        of = [v for v in verdicts if v.setting.kind == kind]
        models = dict.fromkeys(v.model for v in of)
        wrong = {v.model for v in of if v.outcome in (REFUSED, NO_SUM, FALSE)}
        if models:
            lines += [
                "",
                f"With inputs {name}, {len(models) - len(wrong)} of {len(models)} models pass in all settings that they have.",
            ]
    return lines


def _refusals(verdicts: list[Verdict]) -> list[str]:
    """One item for each refusal of a model, with the settings that have it."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for v in verdicts:
        if v.outcome in (REFUSED, NO_SUM, FALSE):
            found[v.model, f"`{v.op}` at {v.line}: {v.reason}"].append(_heading(v.setting))
    if not found:
        return []
    lines = ["", "## What does not pass, and why", ""]
    for (model, text), where in found.items():
        lines.append(f"- **{model}** ({', '.join(where)}): {text}")
        if model in EXPLAINED:
            lines.append(f"  {EXPLAINED[model]}")
    return lines
