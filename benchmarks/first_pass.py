"""The first pass of 24 layers in a new process costs at most 3 times a warm one.

`python -m benchmarks.first_pass` prints both in seconds. The model has run unchecked
before, so that what torch itself does the first time does not count.
"""

import statistics
import subprocess
import sys
import time

import torch

from benchmarks.models import AXES, LENGTH, Model, llama
from benchmarks.timing import Result
from placements import set_current_mesh, typecheck

LIMIT = 3.0
LAYERS, PASSES = 24, 9


def measure() -> list[Result]:
    command = [sys.executable, "-m", "benchmarks.first_pass"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    first, warm = map(float, ran.stdout.split()[-2:])
    shown = f"{first / warm:.2f} ({first * 1e3:.0f} ms)"
    what = f"first checked pass of {LAYERS} layers of Llama, over a warm one"
    return [Result(what, shown, f"<= {LIMIT}", first <= LIMIT * warm)]


def _seconds(model: Model) -> float:
    arguments = model.typed(LENGTH)
    start = time.thread_time()
    model.module(*arguments)
    return time.thread_time() - start


def main() -> None:
    torch.set_num_threads(1)
    model = llama(LAYERS)
    model.module(*model.arguments(LENGTH))
    with set_current_mesh(AXES), typecheck():
        model.declared(LENGTH)
        first, *warm = (_seconds(model) for _ in range(PASSES))
    print(first, statistics.median(warm))


if __name__ == "__main__":
    main()
