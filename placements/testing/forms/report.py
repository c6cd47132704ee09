"""Runs many forms of many ops, counts what became of them, and shows what fails."""

import multiprocessing
import random
import resource
import warnings
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from placements._torch import require
from placements.testing.forms.draw import draw_form
from placements.testing.forms.form import Form
from placements.testing.forms.judge import Judgement, judge
from placements.testing.forms.operands import places
from placements.testing.forms.runs import source_of
from placements.testing.forms.signatures import signatures

ATTEMPTS = 40  # lines drawn for one that runs on one device
MEMORY = 4 << 30  # bytes that a line may ask for


@dataclass(frozen=True)
class FormFailure:
    """A form that breaks the law."""

    op: str
    number: int
    seed: int
    kind: str
    detail: str
    line: str
    operands: str
    mesh: str
    snippet: str

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.line}   with {self.operands} on {self.mesh}\n"
            f"    {self.detail}\n"
            f"    --ops {self.op} --seed {self.seed} --only {self.number}"
        )


@dataclass
class FormTally:
    """What became of the forms of one op.

    `claimed` are the accepted forms whose types say something on every axis, which Varying
    does not. `plain` are the forms without a trait that is a reason to refuse them though
    they may be right, `plain_accepted` those of them that are accepted and true, and
    `by_trait` the refused forms of each trait.
    """

    forms: int = 0
    accepted: int = 0
    claimed: int = 0
    refused: int = 0
    plain: int = 0
    plain_accepted: int = 0
    overloads: set[str] = field(default_factory=lambda: set[str]())
    by_trait: Counter[str] = field(default_factory=lambda: Counter[str]())


@dataclass
class Report:
    """Counts by op, and all failures."""

    tallies: dict[str, FormTally] = field(default_factory=lambda: dict[str, FormTally]())
    failures: list[FormFailure] = field(default_factory=lambda: list[FormFailure]())

    def add(self, other: "Report") -> None:
        self.tallies |= other.tallies
        self.failures += other.failures

    def counts(self) -> dict[str, int]:
        tallies = self.tallies.values()
        kinds = [failure.kind for failure in self.failures]
        return {
            "ops": len(self.tallies),
            "overloads": sum(len(t.overloads) for t in tallies),
            "forms tried": sum(t.forms for t in tallies),
            "accepted and true": sum(t.accepted for t in tallies),
            "refused": sum(t.refused for t in tallies),
            "false": kinds.count("false"),
            "ranks disagree": kinds.count("disagree"),
            "exceptions of the checker": kinds.count("crash"),
            "exceptions of torch on a rank": kinds.count("torch"),
            "refused without a name": kinds.count("nameless"),
        }

    def summary(self) -> str:
        return "\n".join(f"{count:8} {name}" for name, count in self.counts().items())

    def __str__(self) -> str:
        return "\n".join([*map(str, self.failures), self.summary()])


def run(
    ops: Iterable[str], forms: int, seed: int = 0, about: Collection[str] = ()
) -> Report:
    """Try `forms` call forms of each op; the same seed draws the same forms."""
    report = Report()
    for found in reports(ops, forms, seed, about=about):
        report.add(found)
    return report


def reports(
    ops: Iterable[str],
    forms: int,
    seed: int,
    only: int | None = None,
    jobs: int = 1,
    about: Collection[str] = (),
) -> Iterator[Report]:
    """Yield a report of each op as soon as there is one; `jobs` processes share the ops."""
    one_op = partial(run_op, forms=forms, seed=seed, only=only, about=about)
    if jobs == 1:
        yield from map(one_op, ops)
    else:
        # A process that is killed breaks this pool; multiprocessing.Pool would wait for it.
        spawned = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, spawned) as pool:
            yield from pool.map(one_op, ops)


def run_op(
    op: str, forms: int, seed: int, only: int | None, about: Collection[str]
) -> Report:
    """Try `forms` call forms of one op, or form `only` alone."""
    require("drawing")
    with limits():
        return _run_op(op, range(forms) if only is None else [only], seed, about)


@contextmanager
def limits() -> Generator[None]:
    """Judge forms inside: on one thread, without warnings, with bounded memory."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(), _memory_left(MEMORY):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _memory_left(size: int) -> Generator[None]:
    """Let an allocation beyond `size` bytes fail, so that a line with it is no form.

    A drawn size may ask for more than the machine has, and then the system kills.
    """
    pages = Path("/proc/self/statm")
    if not pages.exists():  # only Linux says how much a process has
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = resource.getpagesize() * int(pages.read_text().split()[0])
    limit = used + size if before[1] < 0 else min(used + size, before[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _run_op(op: str, numbers: Iterable[int], seed: int, about: Collection[str]) -> Report:
    tally = FormTally()
    report = Report({op: tally})
    if not signatures(op):
        return report
    for number in numbers:
        found = first_valid(op, number, seed, about)
        if found is not None:
            form, judgement = found
            _count(tally, form, judgement)
            if judgement.fails:
                report.failures.append(_failure(form, judgement, number, seed))
    return report


def first_valid(
    op: str, number: int, seed: int, about: Collection[str]
) -> tuple[Form, Judgement] | None:
    """Draw form `number` of an op and judge it; None if none runs on one device."""
    # What becomes of one form leaves the numbers of the others alone.
    rng = random.Random(f"{seed}:{op}:{number}")
    torch.default_generator.manual_seed(number)
    for _ in range(ATTEMPTS):
        form = draw_form(rng, op, about)
        judgement = judge(form, random.Random(number))
        if judgement.kind != "invalid":
            return form, judgement
    return None


def _count(tally: FormTally, form: Form, judgement: Judgement) -> None:
    tally.forms += 1
    tally.overloads.add(form.overload)
    plain = form.is_plain
    tally.plain += plain
    if judgement.kind == "accepted":
        tally.accepted += 1
        tally.claimed += judgement.claims
        tally.plain_accepted += plain
    if judgement.kind == "refused":
        tally.refused += 1
        tally.by_trait.update(form.traits)


def _failure(form: Form, judgement: Judgement, number: int, seed: int) -> FormFailure:
    operands = ", ".join(
        f"{x.name} {list(next(iter(x.values.values())).shape)} {_types(x.types)}"
        for x in form.operands.values()
    )
    return FormFailure(
        form.op, number, seed, judgement.kind, judgement.detail, form.line, operands,
        str(form.sizes), snippet(form, judgement),
    )  # fmt: skip


def _types(types: object) -> str:
    return str(types).replace("'", "")


def snippet(form: Form, judgement: Judgement) -> str:
    """Python that does the same on each rank, to be pasted into a file."""
    lines = [
        "import math, numpy as np, torch, torch.nn.functional as F",
        "from torch import nn, tensor",
        "from placements import *",
        f"# {judgement.kind}: {judgement.detail}",
    ]
    for x in form.operands.values():
        for where, value in x.values.items():
            at = f"  # at {dict(where)}" if where else ""
            dtype = value.dtype
            lines.append(
                f"# global {x.name} = tensor({_numbers(value)}, dtype={dtype}){at}"
            )
    for rank in places(form.sizes, list(form.sizes)):
        for x in form.operands.values():
            piece = x.locals[rank]
            made = f"tensor({_numbers(piece)}, dtype={piece.dtype})"
            lines.append(f"{x.name} = {made}.reshape({list(piece.shape)})")
        lines.append(
            f"with typecheck(), set_current_mesh(Mesh({form.sizes}, {dict(rank)})):"
        )
        for x in form.operands.values():
            types = ", ".join(f"{axis!r}: {_spelled(t)}" for axis, t in x.types.items())
            index = f", index={x.index!r}" if x.index else ""
            lines.append(f"    assert_type({x.name}, {{{types}}}{index})")
        lines += ["    " + line for line in _statements(form)]
    return "\n".join(lines)


def _numbers(x: Tensor) -> Any:
    return cast(Any, x).tolist()


def _spelled(t: object) -> str:
    extent = getattr(t, "extent", None)
    return f"S({getattr(t, 'dim', 0)}, {extent!r})" if extent is not None else repr(t)


def _statements(form: Form) -> list[str]:
    shown = "print(result, type_of(result) if isinstance(result, torch.Tensor) else '')"
    return [*source_of(form).split("\n"), shown]
