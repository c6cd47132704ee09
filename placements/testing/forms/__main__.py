"""`python -m placements.testing.forms --ops sum,view --forms 200 --seed 0`."""

import argparse
import sys

from placements.inference.ops import OPS
from placements.testing.forms.report import run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m placements.testing.forms")
    parser.add_argument(
        "--ops", help="names of ops, with commas between them; default: all"
    )
    parser.add_argument("--forms", type=int, default=100, help="forms of each op")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="show this form alone, as Python")
    given = parser.parse_args(arguments)
    ops = given.ops.split(",") if given.ops else list(OPS)
    forms = given.forms if given.only is None else given.only + 1
    report = run(ops, forms, given.seed, given.only)
    if given.only is not None:
        for failure in report.failures:
            print(failure.snippet)
    print(report)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
