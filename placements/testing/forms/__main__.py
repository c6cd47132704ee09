"""`python -m placements.testing.forms --ops sum,view --forms 200 --seed 0 --jobs 2`."""

import argparse
import sys

from placements.inference.ops import OPS
from placements.testing.forms.report import Report, reports


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m placements.testing.forms")
    parser.add_argument(
        "--ops", help="names of ops, with commas between them; default: all"
    )
    parser.add_argument("--forms", type=int, default=100, help="forms of each op")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="show this form alone, as Python")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the ops")
    parser.add_argument(
        "--slot", default="", help="give this slot always, and mostly in an odd way"
    )
    given = parser.parse_args(arguments)
    ops = given.ops.split(",") if given.ops else list(OPS)
    forms = given.forms if given.only is None else given.only + 1
    report = Report()
    about = given.slot.split(",") if given.slot else ()
    for found in reports(ops, forms, given.seed, given.only, given.jobs, about):
        for failure in found.failures:
            print(failure.snippet if given.only is not None else failure, flush=True)
        report.add(found)
    print(report.summary())
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
