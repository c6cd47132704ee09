"""Faults at random moments of a run, each followed by a resume that must be exact.

A chain is one directory of checkpoints. Each of its runs gets one fault: a rank or the
launcher is killed, stopped or asked to end, while the ranks import, between two steps, or
while a checkpoint is written. The next run resumes. What a fault threw away is computed
again, and has to be the same to the last bit.
"""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from spmd_moe.training.losses import read_losses
from spmd_moe.training.manifest import checkpoints_in, name_of, step_of
from tests.support.train_runs import (
    SMALL,
    Run,
    ended,
    is_running,
    ranks_of,
    started,
    state_of,
)

STEPS = ["--steps", "100000"]  # never reached
TIMEOUT = 45.0  # seconds: --timeout of the runs
SLACK = 30.0  # for a machine that does much else
PATIENCE = 240.0  # until a moment comes
PHASES = ("start", "step", "write")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT)
LAUNCHER = "launcher"


@dataclass(frozen=True)
class Moment:
    """Which signal, to whom (the number of a rank, or the launcher), and when."""

    phase: str
    signal: signal.Signals
    victim: str
    delay: float

    def __str__(self) -> str:
        whom = self.victim if self.victim == LAUNCHER else f"rank {self.victim}"
        return f"{self.signal.name} to {whom}, {self.phase} + {self.delay:.3f} s"


def draw_moment(rng: random.Random, ranks: int) -> Moment:
    phase = rng.choices(PHASES, weights=(2, 3, 4))[0]
    sent = rng.choices(SIGNALS, weights=(4, 2, 3, 1))[0]
    victim = LAUNCHER if rng.random() < 0.3 else str(rng.randrange(ranks))
    longest = {"start": 6.0, "step": 1.0, "write": 0.03}[phase]
    return Moment(phase, sent, victim, rng.uniform(0.0, longest))


def wait_for(holds: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.001)


@dataclass
class Chain:
    """The runs in one directory, one after the other."""

    directory: Path
    mesh: str
    ranks: int
    checked: int = 0  # losses that were computed again and found the same
    seconds: list[float] = field(default_factory=list[float])  # from a fault to the end

    @property
    def log(self) -> Path:
        return self.directory / "losses.jsonl"

    def losses(self) -> dict[int, float]:
        return {x.step: x.loss for x in read_losses(self.log)} if self.log.exists() else {}

    def last_saved(self) -> int:
        return max((step_of(path) for path in checkpoints_in(self.directory)), default=0)

    def start(self, *more: str) -> Run:
        resume = ["--resume"] if self.last_saved() else SMALL
        return started(
            "train", "--mesh", self.mesh, "--checkpoint", str(self.directory),
            "--save-every", "3", "--timeout", str(TIMEOUT), *resume, *(more or STEPS),
        )  # fmt: skip

    def suffer(self, moment: Moment) -> str:
        """Run until the moment, let it happen, and check how the run ends; says how."""
        before, resumed_at = self.losses(), self.last_saved()
        run = self.start()
        try:
            ranks = self._wait_for_moment(run, moment)
            reached = max(self.losses(), default=0)
            code, error, seconds = self._happens(run, ranks, moment, reached)
        finally:
            ended(run)
        wait_for(lambda: not any(map(is_running, ranks)), 5.0, f"{moment}: ranks left")
        self._check_told(moment, ranks, code, error)
        self._check_exact(before, resumed_at)
        self.seconds.append(seconds)
        return f"code {code:4d} after {seconds:4.1f} s, {name_of(self.last_saved())}"

    def _wait_for_moment(self, run: Run, moment: Moment) -> list[int]:
        def is_here() -> bool:
            assert run.poll() is None, run.communicate()
            if len(ranks_of(run.pid)) < self.ranks:
                return False
            if moment.phase == "start":
                return True
            if moment.phase == "step":
                is_on = max(self.losses(), default=0) > resumed_at
                return is_on and is_new(self.log, began)
            return any(is_new(path, began) for path in self.directory.glob(".unfinished-*"))

        began, resumed_at = time.time(), self.last_saved()
        try:
            wait_for(is_here, PATIENCE, f"{moment}")
        except AssertionError as late:
            raise AssertionError(f"{late}; {waiting(run.pid)}") from None
        time.sleep(moment.delay)
        return ranks_of(run.pid)

    def _happens(
        self, run: Run, ranks: list[int], moment: Moment, reached: int
    ) -> tuple[int, str, float]:
        pid = run.pid if moment.victim == LAUNCHER else ranks[int(moment.victim)]
        sent = time.monotonic()
        os.kill(pid, moment.signal)
        if is_harmless(moment):
            if moment.signal == signal.SIGSTOP:
                time.sleep(1.0)
                assert state_of(pid) == "T"
                os.kill(pid, signal.SIGCONT)
            going_on = lambda: max(self.losses(), default=0) > reached + 1  # noqa: E731
            wait_for(going_on, PATIENCE, f"{moment}: the run goes on")
            sent = time.monotonic()
            os.kill(run.pid, signal.SIGTERM)
        # A rank heeds SIGTERM, and is missed by others, when it has imported torch: how
        # long that takes is up to the machine, as it is until a moment comes.
        longest = TIMEOUT + SLACK + (PATIENCE if moment.phase == "start" else 0.0)
        try:
            _, error = run.communicate(timeout=longest)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{moment}: not ended after {longest:g} s; {waiting(run.pid)}"
            ) from None
        return run.returncode, error, time.monotonic() - sent

    def _check_told(self, moment: Moment, ranks: list[int], code: int, error: str) -> None:
        """The exit code and the first cause are the true ones."""
        said = (moment, code, error)
        if is_harmless(moment) or moment.signal == signal.SIGTERM:
            assert code == 143 and "stopped by SIGTERM" in error, said
            if moment.victim != LAUNCHER and not is_harmless(moment):
                assert f"stopped by SIGTERM to rank {moment.victim} after" in error, said
        elif moment.victim == LAUNCHER:
            assert code == {signal.SIGKILL: -9, signal.SIGINT: 130}[moment.signal], said
        else:
            how = {signal.SIGKILL: "was killed by SIGKILL", signal.SIGSTOP: "is stopped"}
            named = f"rank {moment.victim} (pid {ranks[int(moment.victim)]})"
            assert code == 1 and f"{named} {how[moment.signal]}" in error, said

    def _check_exact(self, before: dict[int, float], resumed_at: int) -> None:
        """What both this run and the one before it computed is the same, bit for bit."""
        now = self.losses()
        assert list(now) == list(range(1, len(now) + 1))
        for step in set(now) & set(before):
            assert now[step] == before[step], (step, now[step], before[step])
            self.checked += step > resumed_at

    def finish(self, reference: Path) -> int:
        """Run on to an end, and compare all losses with a run that nothing happened to."""
        last = max(self.losses(), default=0) + 2
        for directory in (self.directory, reference):
            chain = Chain(directory, self.mesh, self.ranks)
            run = chain.start("--steps", str(last))
            try:
                out, error = run.communicate(timeout=1200)
            finally:
                ended(run)
            assert run.returncode == 0, (out, error)
        assert self.losses() == Chain(reference, self.mesh, self.ranks).losses()
        return last


def is_new(path: Path, began: float) -> bool:
    """Return whether this run wrote it: what is unfinished may be of the one before."""
    try:
        return path.stat().st_mtime > began
    except FileNotFoundError:
        return False


def waiting(launcher: int) -> str:
    """Say what a launcher and its ranks are at: starved ones run, hanging ones sleep."""
    found: list[str] = []
    for pid in (launcher, *ranks_of(launcher)):
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        place = Path(f"/proc/{pid}/wchan").read_text()
        found.append(f"{pid}: {state_of(pid)} in {place}, {sum(map(int, times))} ticks")
    return "; ".join(found)


def is_harmless(moment: Moment) -> bool:
    """Return whether a run goes on: a rank leaves Ctrl-C to the launcher, and a launcher

    that is stopped for a while finds its ranks where they are.
    """
    to_launcher = moment.victim == LAUNCHER
    return moment.signal == (signal.SIGSTOP if to_launcher else signal.SIGINT)
