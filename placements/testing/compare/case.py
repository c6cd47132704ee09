"""One case: a function on simulated ranks against a reference on one device.

The ranks run with real communication. Results and gradients are joined by the types that
the checker inferred, or, of a program that is run as it is, by those that the caller says.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from placements._torch import pytree
from placements.annotations.declarations import type_of
from placements.checker.mode import typecheck
from placements.runtime.declared import declared
from placements.runtime.errors import PlacementError
from placements.runtime.mesh import set_current_mesh
from placements.testing.compare.inputs import (
    GlobalInput,
    TypedValue,
    global_input,
    part_here,
    typed_part,
)
from placements.testing.compare.one_device import (
    check_value,
    gradients,
    largest,
    shown,
    tolerance_of,
)
from placements.testing.draw.placed import join_ranks, part_of
from placements.testing.draw.whole_numbers import nonzero_numbers, seeded
from placements.testing.ranks.crashes import own_error
from placements.testing.ranks.failures import RankFailure
from placements.testing.ranks.run import device_mesh, run_ranks
from placements.types.axis import AxisType, TypesLike
from placements.types.mesh import Mesh, as_mesh
from placements.types.tensor import TensorType, make

# The note on an error of the reference, which is the user's.
OF_REFERENCE = "raised by the reference"


def check_spmd_case(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Mapping[str, TypedValue],
    *,
    mesh: Mapping[str, int],
    seed: int = 0,
) -> bool:
    """Compare `fn` on simulated ranks with `reference` on one device, in one case.

    `inputs` gives each argument's global value and type; of a module its parameters and
    buffers too, by name. False if the checker refuses (`refusal` says why);
    AssertionError if results or gradients differ; ValueError if an input is none;
    CheckerCrash if the checker itself fails, which is no refusal.
    """
    return refusal(fn, reference, inputs, mesh=mesh, seed=seed) is None


def check_as_it_is(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Mapping[str, TypedValue],
    outs: TypesLike | Sequence[TypesLike],
    *,
    mesh: Mapping[str, int],
    seed: int = 0,
) -> None:
    """Compare a program that no checker sees with `reference` on one device, in one case.

    For code as it is, with DTensor, raw collectives or types of `spmd_types`: `fn` gets
    what each rank holds of `inputs` as plain tensors, by name. `inputs` gives each
    argument's global value and type, and `outs` the type of each result, with the extent
    where its pieces are uneven. AssertionError if results or gradients differ.
    """
    sizes = Mesh(mesh)
    given = {name: global_input(fn, name, placed, sizes) for name, placed in inputs.items()}
    claims = [outs] if isinstance(outs, Mapping) else list(outs)
    ranks = run_ranks(dict(mesh), _rank_as_it_is, fn, given, claims, seed)
    _check_against(reference, ranks, given, sizes, seed)


def refusal(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Mapping[str, TypedValue],
    *,
    mesh: Mapping[str, int],
    seed: int = 0,
) -> PlacementError | None:
    """Do what `check_spmd_case` does, but return what the checker says, or None."""
    sizes = Mesh(mesh)
    given = {name: global_input(fn, name, placed, sizes) for name, placed in inputs.items()}
    stopped, ranks, failure = _on_ranks(_one_rank, fn, given, sizes, seed)

    def plainly() -> None:
        own, _, failed = _on_ranks(_plain_rank, fn, given, sizes, seed)
        raised = [*own, *([failed] if failed is not None else [])]
        if raised:
            raise ExceptionGroup("what the ranks raise without the checker", raised)

    own = own_error([*stopped, *([failure] if failure is not None else [])], plainly)
    for error in stopped:
        if isinstance(error, PlacementError):
            return error
    if own is not None and own is not failure:
        raise AssertionError(f"a rank raised {own!r}") from own
    if failure is not None:
        raise failure
    done = [rank for rank in ranks if rank is not None]
    _check_against(reference, done, given, sizes, seed)
    return None


def _on_ranks(
    program: Callable[[Callable[..., Any], dict[str, GlobalInput], int], Any],
    fn: Callable[..., Any],
    given: Mapping[str, GlobalInput],
    mesh: Mesh,
    seed: int,
) -> "tuple[list[Exception], list[_RankRun | None], RankFailure | None]":
    """Return the errors that stopped ranks, the results, and the failure of all ranks.

    A refusal, and a RuntimeError (shapes that do not fit on a rank; elsewhere that may be
    refused), is kept and not raised, since ranks that fail are set up anew, which takes
    long. Ranks that wait for one that has stopped are no failure of their own.
    """
    # Not an argument, of which every rank has a copy: what a rank leaves here is kept
    # when others, that wait for it, fail.
    stopped: list[Exception] = []

    def on_rank(fn: Callable[..., Any], given: dict[str, GlobalInput]) -> "_RankRun | None":
        try:
            return program(fn, given, seed)
        except (PlacementError, RuntimeError) as error:
            stopped.append(error)
            return None

    try:
        return stopped, run_ranks(dict(mesh.sizes), on_rank, fn, dict(given)), None
    except RankFailure as failure:
        is_own = failure.cause is not None or not stopped
        return stopped, [], failure if is_own else None


def _check_against(
    reference: Callable[..., Any],
    done: "Sequence[_RankRun]",
    given: Mapping[str, GlobalInput],
    sizes: Mesh,
    seed: int,
) -> None:
    values = {
        name: one.value.clone().requires_grad_(one.wants_gradient)
        for name, one in given.items()
    }
    # A module may change its buffers: each case starts with those it was given.
    fresh = copy.deepcopy(reference) if isinstance(reference, nn.Module) else reference
    try:
        whole = _Results(_called(fresh, values))
        whole.check()
    except Exception as error:
        error.add_note(OF_REFERENCE)
        raise
    for rank in done:
        _check_structure(rank.results, whole)
    for k, target in enumerate(whole.tensors):
        _compare([rank.outputs[k] for rank in done], target, sizes, f"result {k}")
    cotangents = [_cotangent(y, y.shape, seed, k) for k, y in enumerate(whole.tensors)]
    for name, gradient in _gradients(whole.tensors, cotangents, values).items():
        held = [rank.gradients[name] for rank in done]
        _compare(held, gradient, sizes, f"the gradient of {name}")


class _Results:
    """What a function returned: its tensors, and all that is around them."""

    def __init__(self, result: Any) -> None:
        leaves, self.structure = cast(tuple[list[Any], Any], pytree.tree_flatten(result))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.others = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def check(self) -> None:
        """Raise ValueError for what cannot be compared."""
        for leaf in self.others:
            if leaf is not Tensor and not isinstance(leaf, bool | int | float | str | None):
                raise ValueError(
                    f"a result is a {type(leaf).__name__}, which cannot be compared: "
                    "return tensors, alone or in tuples, lists and dicts"
                )
        if not self.tensors:
            raise ValueError("nothing to compare: the reference returned no tensor")

    def without_values(self) -> tuple[Any, list[Any]]:
        return self.structure, self.others


def _check_structure(found: tuple[Any, list[Any]], wanted: _Results) -> None:
    if found != wanted.without_values():
        raise AssertionError(
            "the results have another structure than on one device:\n"
            f"on ranks {found[0]} with {found[1]}\n"
            f"on one device {wanted.structure} with {wanted.others}"
        )


@dataclass(frozen=True)
class _Local:
    """A tensor on one rank, and its type there without the rank's own mesh."""

    value: Tensor
    types: dict[str, AxisType]


@dataclass(frozen=True)
class _RankRun:
    results: tuple[Any, list[Any]]
    outputs: list[_Local]
    gradients: dict[str, _Local]


def _one_rank(fn: Callable[..., Any], given: dict[str, GlobalInput], seed: int) -> _RankRun:
    """Return what this rank computes under the checker, and its gradients."""
    held: dict[str, Tensor] = {}
    with set_current_mesh(device_mesh()):
        with typecheck():
            for name, one in given.items():
                held[name] = typed_part(name, one, seed)
            results = _Results(_called(fn, held))
            types = [type_of(y) for y in results.tensors]
        typed = list(zip(results.tensors, types, strict=True))
        outputs = [_Local(y.detach(), dict(t if t is not None else {})) for y, t in typed]
        seeds = [
            _seed(y, t, seed, k) if y.requires_grad else y for k, (y, t) in enumerate(typed)
        ]
        found: dict[str, _Local] = {}
        for name, gradient in _gradients(results.tensors, seeds, held).items():
            t = type_of(held[name])
            found[name] = _Local(gradient, dict(t.dual() if t is not None else {}))
    return _RankRun(results.without_values(), outputs, found)


def _rank_as_it_is(
    fn: Callable[..., Any],
    given: dict[str, GlobalInput],
    claims: Sequence[TypesLike],
    seed: int,
) -> _RankRun:
    """Return what this rank computes without a checker, typed as the caller claims."""
    parts = {name: part_here(name, one, seed) for name, one in given.items()}
    held = {name: part for name, (part, _) in parts.items()}
    with set_current_mesh(device_mesh()):
        results = _Results(_called(fn, held))
        if len(results.tensors) != len(claims):
            raise ValueError(
                f"outs has {len(claims)} types for {len(results.tensors)} results: give "
                "the type of each result"
            )
        mesh = as_mesh(device_mesh())
        types = [
            declared(mesh, claim, tuple(y.shape))
            for y, claim in zip(results.tensors, claims, strict=True)
        ]
        seeds = [
            _seed(y, t, seed, k) if y.requires_grad else y
            for k, (y, t) in enumerate(zip(results.tensors, types, strict=True))
        ]
        found = {
            name: _Local(gradient, dict(parts[name][1].dual()))
            for name, gradient in _gradients(results.tensors, seeds, held).items()
        }
    outputs = [
        _Local(y.detach(), dict(t)) for y, t in zip(results.tensors, types, strict=True)
    ]
    return _RankRun(results.without_values(), outputs, found)


def _plain_rank(fn: Callable[..., Any], given: dict[str, GlobalInput], seed: int) -> None:
    """Run the program without the checker, to see whether it raises by itself."""
    with set_current_mesh(device_mesh()):
        held = {name: typed_part(name, one, seed) for name, one in given.items()}
        results = _Results(_called(fn, held)).tensors
        _gradients(results, [torch.ones_like(y) for y in results], held)


def _called(fn: Callable[..., Any], values: Mapping[str, Tensor]) -> Any:
    """Call a function, or a module with those of the values that are its state."""
    if not isinstance(fn, nn.Module):
        return fn(**values)
    own = {name for name, _ in [*fn.named_parameters(), *fn.named_buffers()]}
    state = {name: value for name, value in values.items() if name in own}
    rest = {name: value for name, value in values.items() if name not in own}
    return torch.func.functional_call(fn, state, (), rest)


def _gradients(
    results: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the gradient of each input that has one; zeros if it is not used."""
    found = gradients(results, cotangents, list(inputs.values()))
    return {
        name: torch.zeros_like(x) if gradient is None else gradient
        for (name, x), gradient in zip(inputs.items(), found, strict=True)
        if x.requires_grad
    }


def _seed(y: Tensor, t: TensorType | None, seed: int, k: int) -> Tensor:
    """Return this rank's part of the cotangent of one result."""
    assert t is not None
    whole = _cotangent(y, t.global_shape(tuple(y.shape)), seed, k)
    return part_of(whole, t.dual(), seeded(seed, "cotangent", k))


def _cotangent(y: Tensor, shape: Sequence[int], seed: int, k: int) -> Tensor:
    return nonzero_numbers(shape, seeded(seed, "w", k), y.dtype)


def _compare(held: Sequence[_Local], wanted: Tensor, mesh: Mesh, what: str) -> None:
    types = [
        make(mesh.seen_from(place), one.types)
        for place, one in zip(mesh.coordinates(), held, strict=True)
    ]
    try:
        (found,) = join_ranks([one.value for one in held], types, mesh).values()
    except ValueError as error:
        lines = [f"rank {r}: {shown(one.value)}" for r, one in enumerate(held)]
        locals_ = "\n".join(lines)
        raise AssertionError(f"{what} is no global value: {error}\n{locals_}") from None
    # A module may add large terms that cancel in some elements; the others show their size.
    is_double = wanted.dtype is torch.float64
    unit = min(max(1.0, largest(wanted)), 1e3) if is_double else 1.0
    check_value(what, found, wanted, unit=unit, tolerance=tolerance_of(wanted.dtype))
