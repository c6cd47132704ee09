"""`python -m tests.trainer`: what a trainer does, compared with one device.

    python -m tests.trainer --only checkpointing
    python -m tests.trainer --markdown > docs/trainer_features.md

Exit status 1 if something that was not refused differs from one device.
"""

import argparse
import sys
import warnings

from tests.trainer.features import COLUMNS, FEATURES
from tests.trainer.judge import Cell, cell
from tests.trainer.page import page


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.trainer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="part of the names of features")
    parser.add_argument("--markdown", action="store_true", help="print the page")
    parser.add_argument("--backend", default="sim", choices=["sim", "gloo"])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, dict[str, Cell]] = {}
    for feature in FEATURES:
        if options.only not in feature.name:
            continue
        row = {n: cell(feature, s, options.backend) for n, s in COLUMNS.items()}
        found[feature.name] = row
        shown = ", ".join(f"{name}: {one}" for name, one in row.items())
        print(f"{feature.name}: {shown}", file=sys.stderr, flush=True)
    if options.markdown:
        print(page(found))
    return 0 if all(one.is_right for row in found.values() for one in row.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
