"""Does a typed function compute, on every mesh, what one device computes?

`assert_spmd_equivalent` draws meshes, sizes, placements that the annotations allow, and
values; runs the function on simulated ranks under the checker and the reference on one
device; and compares results and all gradients. What the checker refuses is not compared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import Phase, given, settings

from placements.runtime.errors import PlacementError
from placements.testing.compare.case import OF_REFERENCE, refusal
from placements.testing.compare.drawn_cases import Case, Values, case_space, cases
from placements.testing.draw.arguments import Argument, arguments_of
from placements.testing.ranks.crashes import CheckerCrash, crash_of
from placements.testing.ranks.failures import RankFailure


def assert_spmd_equivalent(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    *,
    sizes: Mapping[str, int | Sequence[int]] | None = None,
    values: Mapping[str, Values] | None = None,
    max_ranks: int = 4,
    max_size: int = 5,
    examples: int | None = None,
) -> None:
    """Raise AssertionError with the smallest case found where ranks and one device differ.

    CheckerCrash if the checker itself fails: that is no refusal.

    `fn` is a `@typed` function (or module with declared parameters), `reference` takes
    the same arguments, global. `sizes` gives dims (by the names in the annotations) the
    sizes they may have. `values` draws arguments, by name: whole numbers are else 0 to 3,
    and -3 to 3 in floats. Fails too if fewer than one in 20 cases says something:
    accepted by the checker, on several ranks, with elements in every input.
    """
    count = settings().max_examples if examples is None else examples
    for name, given_number, least in (
        ("max_ranks", max_ranks, 2), ("max_size", max_size, 1), ("examples", count, 1)
    ):  # fmt: skip
        if given_number < least:
            raise ValueError(f"{name} must be at least {least}, got {given_number}")
    arguments = arguments_of(fn)
    for argument in arguments:
        if not argument.by_name:
            raise ValueError(
                f"argument {argument.name!r} is positional-only, and would be given by name"
            )
    space = case_space(
        fn, reference, arguments, sizes or {}, values or {}, max_ranks, max_size
    )
    tally = _Counts()

    @settings(
        max_examples=count, phases=[Phase.generate, Phase.shrink], deadline=None,
        report_multiple_bugs=False,
    )  # fmt: skip
    @given(cases(space))
    def law(case: Case) -> None:
        try:
            refused = refusal(fn, reference, case.inputs, mesh=case.mesh, seed=case.seed)
        except Exception as error:
            raise _told(error, arguments, case.code(fn, reference)) from error
        tally.add(case, refused)

    law()
    tally.check(list(space.meshes[0].sizes))


def _told(error: Exception, arguments: Sequence[Argument], code: str) -> Exception:
    """Return what is raised for a case; a failure of the checker stays one."""
    if isinstance(error, CheckerCrash):
        return CheckerCrash(error.cause, f"\n\n{code}")
    if OF_REFERENCE in getattr(error, "__notes__", ()):
        said = f"the reference raised {error!r}"
    elif isinstance(error, AssertionError | RankFailure):
        said = str(error)
    else:  # neither the ranks nor the reference: the comparison itself
        return crash_of(error, f"\n\n{code}")
    return AssertionError(f"{said}{_advice(error, arguments)}\n\n{code}")


def _advice(error: Exception, arguments: Sequence[Argument]) -> str:
    """Return advice on an index out of range: only the user knows the bounds."""
    whole = [a.name for a in arguments if not a.dtype.is_floating_point]
    if not whole or not isinstance(error.__cause__ or error, IndexError):
        return ""
    return (
        f"\nIf {whole[0]!r} holds indices, say how to draw them, and of what: sizes={{'V': "
        f"4}}, values={{{whole[0]!r}: lambda shape, generator: "
        "torch.randint(4, shape, generator=generator)}"
    )


@dataclass
class _Counts:
    """What was tried, and what it showed."""

    tried: int = 0
    telling: list[dict[str, int]] = field(default_factory=list[dict[str, int]])
    refused: int = 0
    smallest: tuple[tuple[int, int], PlacementError] | None = None

    def add(self, case: Case, refused: PlacementError | None) -> None:
        self.tried += 1
        if refused is not None:
            self.refused += 1
            if self.smallest is None or case.size() < self.smallest[0]:
                self.smallest = case.size(), refused
        elif case.says_something():
            self.telling.append(case.mesh)

    def check(self, axes: Sequence[str]) -> None:
        """Raise AssertionError if too little was compared, as a whole or on one axis."""
        alone = [a for a in axes if all(mesh[a] == 1 for mesh in self.telling)]
        if 20 * len(self.telling) < self.tried:
            found = f"only {len(self.telling)} of {self.tried} cases"
        elif alone and self.tried >= 20:  # of fewer, chance may leave an axis out
            found = f"no case with more than one rank on axis {alone[0]!r}"
        else:
            return
        text = (
            f"{found} could show a difference: accepted, on more than one rank, with "
            f"elements in every input. The checker refused {self.refused} of {self.tried}"
        )
        if self.smallest is not None:
            text += f"; the smallest of these:\n{self.smallest[1]}"
            text += "\nIf it takes equal pieces only, give such sizes: sizes={'T': [4, 12]}"
        raise AssertionError(text)
