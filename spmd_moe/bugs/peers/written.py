"""Find the programs of a bug that are written in the words of a peer.

A bug that our own program can only say in our words has other programs in `programs/`.
A class there, named by the bug's number, has `wrong_for_peers` and `right_for_peers`, for
every peer; and `wrong_for_dtensor` and `right_for_dtensor` where DTensor needs another
text: a local region, since it has no Varying and no word of its own for Invariant. They
return their results by name, so that a wrong program that is accepted can be compared with
the right one. `unwritten` says why a peer cannot be asked.
"""

from collections.abc import Callable
from typing import Any

from spmd_moe.bugs.peers.programs import (
    extents,
    gradients,
    lockstep,
    losses,
    partial_sums,
    scaled,
    statistics,
    tokens,
)

_MODULES = (
    gradients, scaled, partial_sums, statistics, tokens, extents, lockstep, losses
)  # fmt: skip
BY_ID: dict[str, type[Any]] = {
    name: value
    for module in _MODULES
    for name, value in vars(module).items()
    if name[:1] == "B" and name[1:].isdigit()
}

_NORM = "its words end before the gradient norm"
_STATE = "its words end before buffers and checkpoints"
# By bug, what no peer can be asked; and by bug and peer.
UNWRITTEN: dict[str, str] = {"B62": _NORM, "B73": _STATE, "B74": _STATE, "B76": _STATE}
UNWRITTEN_IN: dict[tuple[str, str], str] = {
    ("B49", "DTensor"): "a tensor cannot be declared anew, it has its placements",
}


def written_for(
    peer: str, bug_id: str
) -> tuple[Callable[..., Any] | None, Callable[..., Any]] | None:
    """Return the wrong and the right program for a peer, if this package has them."""
    programs = BY_ID.get(bug_id)
    for suffix in ("dtensor", "peers") if peer == "DTensor" else ("peers",):
        right = getattr(programs, f"right_for_{suffix}", None)
        if right is not None:
            return getattr(programs, f"wrong_for_{suffix}", None), right
    return None


def unwritten(peer: str, bug_id: str) -> str | None:
    """Say why no program can put a bug to a peer; None if one can."""
    return UNWRITTEN.get(bug_id) or UNWRITTEN_IN.get((bug_id, peer))
