"""What all ranks must say alike of a name, compared before anything is saved."""

import hashlib
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from placements.collectives.objects import from_all_ranks
from placements.runtime.errors import refused
from placements.types.mesh import Mesh


def check_alike(
    call: str, mesh: Mesh, mine: Mapping[str, Any], *, rule: str, advice: str = ""
) -> None:
    """Raise PlacementError for the first name of which two ranks say different things.

    Communicates: a digest of what this rank says; all of it where digests differ.
    """
    digest = hashlib.blake2b(repr(mine).encode(), digest_size=16).hexdigest()
    if len(set(from_all_ranks(mesh, digest).values())) == 1:
        return
    for (rank, first), (other, second) in pairwise(from_all_ranks(mesh, mine).items()):
        for name in [*first, *(name for name in second if name not in first)]:
            if first.get(name) != second.get(name):
                raise refused(
                    call,
                    f"{name!r} is not alike on ranks {rank} and {other}",
                    name=name,
                    expected=str(first.get(name)),
                    actual=str(second.get(name)),
                    rule=rule,
                    operands=[
                        f"rank {rank}: {first.get(name, 'not there')}",
                        f"rank {other}: {second.get(name, 'not there')}",
                    ],
                    advice=advice,
                )
