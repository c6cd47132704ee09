"""The store of a simulated world, as each rank sees it."""

from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist

from placements.testing.ranks.calls import Simulation
from placements.testing.ranks.failures import SourceLine, shown_line, user_line


@dataclass
class _Keys:
    """What a rank waits for when it waits for keys of the store."""

    store: Any
    keys: list[str]
    line: SourceLine

    @property
    def done(self) -> bool:
        return self.store.check(self.keys)

    def describe(self) -> str:
        return f"store.wait({self.keys})  at {shown_line(self.line)}"


_Store: Any = cast(Any, dist).Store  # torch exports it without saying so


class SimStore(_Store):
    """One rank's view of the store of all; to wait for a key gives the baton away."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        _Store.__init__(self)
        self._simulation = simulation
        self._rank = rank

    def wait(self, keys: list[str], timeout: object = None) -> None:
        awaited = _Keys(self._simulation.store, keys, user_line())
        self._simulation.scheduler.wait(self._rank, awaited)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._simulation.store.get(key)

    def set(self, key: str, value: str | bytes) -> None:
        self._simulation.store.set(key, value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._simulation.store.compare_set(key, expected, desired)

    def add(self, key: str, amount: int) -> int:
        return self._simulation.store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._simulation.store.check(keys)

    def delete_key(self, key: str) -> bool:
        return self._simulation.store.delete_key(key)

    def num_keys(self) -> int:
        return self._simulation.store.num_keys()

    # C++ looks for these names.
    deleteKey = delete_key
    getNumKeys = num_keys
