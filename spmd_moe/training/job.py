"""The record that tells every rank of a run what to do; it travels as JSON."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from spmd_moe.config import Parallel
from spmd_moe.training.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: a recipe on ranks, for so many steps, with what is written and checked.

    `mesh` is the text of the degrees of `parallel`. `resume` is the checkpoint to start
    from. `verify_every` and `save_every` count steps; 0 is never. `compare` is where the
    plot beside one device goes. `fsdp` shards what ranks share. `backend` is that of
    torch.compile; None is without.
    """

    recipe: Recipe
    parallel: Parallel
    mesh: str
    steps: int
    checkpoint: str | None = None
    save_every: int = 50
    keep: int = 2
    resume: str | None = None
    verify_every: int = 0
    compare: str | None = None
    log: str | None = None
    timeout: float = 120.0
    fsdp: bool = False
    backend: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def directory(self) -> Path | None:
        return None if self.checkpoint is None else Path(self.checkpoint)


def job_from_json(text: str) -> Job:
    found = json.loads(text)
    recipe, parallel = Recipe(**found.pop("recipe")), Parallel(**found.pop("parallel"))
    return Job(recipe=recipe, parallel=parallel, **found)
