"""`make test-faults`: 60 faults at random moments, on meshes of two axes.

The moments follow from the seed, apart from what the machine adds to them.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.moments import Chain, draw_moment

# The first mesh has two dense and two sparse axes, the second one of each.
MESHES = {"dp=2,tp=2,ep=2": 4, "dp=2,ep=2": 2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, began = random.Random(options.seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as place:
        chains = [Chain(Path(place, m), m, ranks) for m, ranks in MESHES.items()]
        for number in range(options.moments):
            chain = chains[number % len(chains)]
            moment = draw_moment(rng, chain.ranks)
            said = chain.suffer(moment)
            print(
                f"{number + 1:3d} of {options.moments}  {chain.mesh:14s}  {moment}: {said}"
            )
            sys.stdout.flush()
        for chain in chains:
            steps = chain.finish(Path(place, f"{chain.mesh}-whole"))
            print(
                f"{chain.mesh}: {steps} losses equal those of an uninterrupted run; "
                f"{chain.checked} of them were computed twice",
                flush=True,
            )
    seconds = [s for chain in chains for s in chain.seconds]
    print(
        f"{len(seconds)} faults, nothing left running; from a fault to the end "
        f"{statistics.median(seconds):.1f} s (median), {max(seconds):.1f} s (longest); "
        f"{time.monotonic() - began:.0f} s in all"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
