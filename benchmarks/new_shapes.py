"""A model whose lengths change every step costs at most twice one whose lengths do not.

Per torch function, over the unchecked model. Every length is new: none is met twice, so the
memo by shapes never serves a step, and what is left is the type for any sizes.
"""

import itertools
import time
from collections.abc import Callable

from torch import Tensor

from benchmarks.models import AXES, LENGTH, Model, functions_of, llama
from benchmarks.timing import Result
from placements import set_current_mesh, typecheck

LIMIT = 2.0
ROUNDS = 60


def measure() -> list[Result]:
    model = llama()
    count = functions_of(model)
    seconds = _seconds(model)
    fixed, new = (
        (seconds[f"{way} checked"] - seconds[f"{way} plain"]) / count * 1e6
        for way in ("fixed", "new")
    )
    shown = f"{new / fixed:.2f} ({new:.1f} us, {fixed:.1f} us)"
    what = "per torch function of Llama with a new length every step, over one length"
    return [Result(what, shown, f"<= {LIMIT}", new <= LIMIT * fixed)]


def _seconds(model: Model) -> dict[str, float]:
    """Mean seconds of a forward by how its lengths are drawn, in interleaved rounds.

    The mean and not the median, because one length in many is dear: what it needs is not
    learned yet, or the memo was full.
    """
    totals: dict[str, float] = {}
    lengths = itertools.count(LENGTH + 1)
    with set_current_mesh(AXES), typecheck():
        model.module(*model.declared(LENGTH))
        for length in itertools.islice(lengths, 2):
            model.module(*model.typed(length))
    for _ in range(ROUNDS):
        for way, length in (("fixed", LENGTH), ("new", next(lengths))):
            plain = _timed(model, model.arguments(length))
            with set_current_mesh(AXES), typecheck():
                checked = _timed(model, model.typed(length), first=model.typed)
            for name, seconds in (("plain", plain), ("checked", checked)):
                key = f"{way} {name}"
                totals[key] = totals.get(key, 0.0) + seconds / ROUNDS
    return totals


def _timed(
    model: Model,
    arguments: tuple[Tensor, ...],
    first: Callable[[int], tuple[Tensor, ...]] | None = None,
) -> float:
    # Blocks make Python forget what it found in classes; a step of old length finds it.
    model.module(*(first or model.arguments)(LENGTH))
    start = time.thread_time()
    model.module(*arguments)
    return time.thread_time() - start
