"""`python -m tests.models`: real models under typecheck(), compared with one device.

    python -m tests.models --only llama,qwen3_moe --types S --mode train --attention eager
    python -m tests.models --causes    # what blocks how many models

Exit status 1 if a result that was accepted is false, or if a model is refused that
`explained.py` does not explain.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable

from tests.models.architectures import ARCHITECTURES
from tests.models.causes import Cause, ranked
from tests.models.explained import EXPLAINED
from tests.models.jobs import Job, all_causes, run_jobs, timed_verdict
from tests.models.judge import FALSE, NO_SUM, PASSED, REFUSED, Setting, Verdict
from tests.models.page import page


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--only", default="", help="names of models, with commas")
    parser.add_argument("--types", default="S,V", help="of the inputs: S, V or both")
    parser.add_argument("--mode", default="train,eval")
    parser.add_argument("--attention", default="eager,sdpa")
    parser.add_argument("--causes", action="store_true", help="count models by cause, of all refusals and not only of the first one")  # fmt: skip
    parser.add_argument("--markdown", action="store_true", help="print docs/models.md")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    chosen = set(options.only.split(",")) - {""}
    given = (options.types, options.attention, options.mode)
    settings = [
        Setting(kind, mode, attention)
        for kind, attention, mode in itertools.product(*(o.split(",") for o in given))
    ]
    models = [a for a in ARCHITECTURES if not chosen or a.name in chosen]
    jobs = list(itertools.product(models, settings))
    if options.causes:
        _print_causes(jobs, run_jobs(all_causes, jobs, options.jobs))
        return 0
    verdicts = _followed(run_jobs(timed_verdict, jobs, options.jobs), len(jobs))
    if options.markdown:
        print(page(verdicts))
        return 0
    _summary(verdicts)
    return 1 if any(_is_bad(v) for v in verdicts) else 0


def _is_bad(verdict: Verdict) -> bool:
    is_not = verdict.outcome in (REFUSED, NO_SUM)
    unexplained = is_not and verdict.model not in EXPLAINED
    return verdict.outcome == FALSE or unexplained


def _followed(found: Iterable[tuple[Verdict, float]], total: int) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for verdict, seconds in found:
        verdicts.append(verdict)
        line = f"{len(verdicts)}/{total} {verdict}, {seconds:.1f} s"
        print(line, file=sys.stderr, flush=True)
    return verdicts


def _print_causes(jobs: list[Job], every: Iterable[list[Cause]]) -> None:
    found: dict[str, list[Cause]] = {}
    for (architecture, setting), of_model in zip(jobs, every, strict=True):
        found.setdefault(architecture.name, []).extend(of_model)
        print(f"{architecture.name} {setting}: {len(of_model)}", file=sys.stderr)
    free = [name for name, of_model in found.items() if not of_model]
    print(f"{len(free)} of {len(found)} models have no refusal: {', '.join(free)}")
    print(ranked(found))


def _summary(verdicts: list[Verdict]) -> None:
    for setting in dict.fromkeys(v.setting for v in verdicts):
        of = [v for v in verdicts if v.setting == setting]
        counts = {
            o: sum(v.outcome == o for v in of) for o in (PASSED, REFUSED, NO_SUM, FALSE)
        }
        print(f"{setting}: {counts}, {len(of) - sum(counts.values())} do not have it")


if __name__ == "__main__":
    sys.exit(main())
