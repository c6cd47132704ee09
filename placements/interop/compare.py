"""Ask all engines about the same programs, from the command line.

`python -m placements.interop.compare --markdown` prints docs/differences.md;
`--random 5000` counts what the engines say of so many drawn programs.
"""

import argparse

from placements.interop.fake_world import fake_world
from placements.interop.report import count_random, markdown, survey


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m placements.interop.compare")
    parser.add_argument("--markdown", action="store_true", help="docs/differences.md")
    parser.add_argument("--random", type=int, metavar="N", help="draw N programs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with fake_world():
        if options.random:
            for (engine, outcome), n in sorted(
                count_random(options.random, options.seed).items()
            ):
                print(f"{n:6}  {engine:18} {outcome}")
        else:
            print(markdown(survey()), end="")


if __name__ == "__main__":
    main()
