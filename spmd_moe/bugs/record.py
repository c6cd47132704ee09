"""What a published bug is here: the wrong program, the right one, and who must refuse.

A bug is a class used as a namespace of static functions, so that `spmd-moe bugs --show`
can print them as they stand:

    one_device()   the results on one device, by name
    wrong()        the bug, on one rank; the simulator runs it on all of them
    right()        the mended program: its results, by name, as this rank holds them
    kit()          only where types and values at crossings cannot tell: the call of the
                   testing kit that refuses the bug (it raises)

`wrong` and `right` run inside `set_current_mesh` and `typecheck()` (or `verify()`), on
every rank of `mesh`. The same bugs in the words of the peers are in `peers/programs`.
`numbers` and `mine` make the values that the programs compute with.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from placements import Index, PlacementError, TypesLike, assert_type, current_mesh, split

# What `one_device` and `right` return: tensors by name.
Results: TypeAlias = dict[str, Tensor | None]

TYPES = "types"  # typecheck() refuses: an op, a collective, a signature, a derived function
VERIFY = "verify"  # verify() refuses: values are not what the types say
KIT = "kit"  # the simulator, check_adjoint or the comparison with one device refuses
BY = (TYPES, VERIFY, KIT)

# The kinds of the bugs.
KINDS: dict[str, str] = {
    "C1": "gradient never reduced",
    "C2": "reduced twice, or scaled by a group size",
    "C3": "Partial misused",
    "C4": "auxiliary loss, counts, expert bias",
    "C5": "token, index or layout provenance",
    "C6": "uneven shards, padding, extents",
    "C7": "gradient dropped by a collective",
    "C8": "experts without tokens, lockstep",
    "C9": "wrong mesh or group, gradient norm",
    "C10": "normalisation of the loss",
    "C11": "random state",
    "C12": "dtype",
    "C13": "aliasing, buffers",
    "C14": "checkpoints of experts",
}


@dataclass(frozen=True)
class Refused:
    """What the error must say: who refuses, on which axis, which tensor, by which rule.

    `name` and `rule` are parts of the error's fields (of its text where the error is not
    a PlacementError).
    """

    by: str
    axis: str | None
    name: str
    rule: str

    def fits(self, error: BaseException) -> bool:
        """Return whether an error says what this record asks for."""
        if not isinstance(error, PlacementError):
            return self.name in str(error) and self.rule in str(error)
        said = self.name in error.name and self.rule in error.rule
        return said and error.axis == self.axis


@dataclass(frozen=True)
class Bug:
    """One entry; the right program's results are joined by the types in `results`."""

    id: str
    project: str
    kind: str
    title: str
    mesh: Mapping[str, int]
    refused: Refused | None  # None: a correct program that must be accepted
    results: Mapping[str, TypesLike]
    programs: type[Any]

    def program(self, name: str) -> Callable[..., Any] | None:
        return getattr(self.programs, name, None)


def bug(
    id: str,
    project: str,
    kind: str,
    title: str,
    *,
    mesh: Mapping[str, int],
    refused: Refused | None,
    results: Mapping[str, TypesLike],
) -> Callable[[type[Any]], Bug]:
    """Make a class of programs a Bug; `kind` is a key of KINDS."""

    def make(programs: type[Any]) -> Bug:
        return Bug(id, project, kind, title, dict(mesh), refused, dict(results), programs)

    return make


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Draw whole numbers from -3 to 3, as float64: small, so that their sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


def mine(
    value: Tensor, types: TypesLike, *, grad: bool = False, index: Index | None = None
) -> Tensor:
    """Declare this rank's part of a global value; with `grad` it is a leaf of autograd."""
    mesh = current_mesh()
    assert mesh is not None
    held = split(value, types, mesh)[dist.get_rank()].requires_grad_(grad)
    return assert_type(held, types, index=index)
