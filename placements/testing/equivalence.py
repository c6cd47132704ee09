"""Does a typed function compute, on every mesh, what one device computes?

`assert_spmd_equivalent` draws meshes, sizes, placements that the annotations allow, and
values; runs the function on simulated ranks under the checker and the reference on one
device; and compares results and all gradients. What the checker refuses is not compared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from placements.annotations import Variable
from placements.declarations import declarations
from placements.testing.arguments import Argument, arguments_of
from placements.testing.failures import RankFailure
from placements.testing.spmd_case import Placed, check_spmd_case
from placements.testing.strategies import extents, numbers, seeded
from placements.types import AxisType, I, P, R, Shard, TypesLike


def assert_spmd_equivalent(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    *,
    sizes: Mapping[str, Sequence[int]] | None = None,
    max_ranks: int = 4,
    max_size: int = 5,
    examples: int | None = None,
) -> None:
    """AssertionError with the smallest case found where ranks and one device differ.

    `fn` is a `@typed` function (or module with declared parameters), `reference` takes
    the same arguments, global. `sizes` gives dims (by the names in the annotations) the
    sizes they may have. Fails too if the checker refuses every case.
    """
    accepted: list[bool] = []
    arguments = arguments_of(fn)
    count = settings().max_examples if examples is None else examples

    @settings(max_examples=count, phases=[Phase.generate, Phase.shrink], deadline=None)
    @given(_cases(arguments, fn, reference, sizes or {}, max_ranks, max_size))
    def law(case: Case) -> None:
        try:
            spread = max(case.mesh.values()) > 1
            accepted.append(case.check(fn, reference) and spread)
        except (AssertionError, RankFailure) as error:
            raise AssertionError(f"{error}\n\n{case.code(fn, reference)}") from error

    law()
    if not any(accepted):
        raise AssertionError(
            f"the checker refused all of {len(accepted)} cases on more than one rank"
        )


@dataclass(frozen=True)
class Case:
    """A mesh, and a global value and type for every argument and parameter."""

    mesh: dict[str, int]
    inputs: dict[str, Placed]
    parameters: dict[str, Placed]
    seed: int

    def check(self, fn: Callable[..., Any], reference: Callable[..., Any]) -> bool:
        if not isinstance(fn, nn.Module):
            return check_spmd_case(
                fn, reference, self.inputs, mesh=self.mesh, seed=self.seed
            )
        assert isinstance(reference, nn.Module)
        names = {name: name.replace(".", "__") for name in self.parameters}
        inputs = {**self.inputs, **{names[n]: p for n, p in self.parameters.items()}}
        return check_spmd_case(
            _with_parameters(fn, names), _with_parameters(reference, names), inputs,
            mesh=self.mesh, seed=self.seed,
        )  # fmt: skip

    def code(self, fn: Callable[..., Any], reference: Callable[..., Any]) -> str:
        """The case as code that runs."""
        every = {**self.inputs, **self.parameters}
        lines = [
            f"    {name!r}: (torch.tensor({cast(Any, value).tolist()}, dtype={value.dtype})"
            f".reshape({tuple(value.shape)}), {_source(types)}),"
            for name, (value, types) in every.items()
        ]
        names = (getattr(f, "__name__", type(f).__name__) for f in (fn, reference))
        return "\n".join(
            [
                "# the smallest case found:",
                f"check_spmd_case({', '.join(names)}, {{",
                *lines,
                f"}}, mesh={self.mesh}, seed={self.seed})",
            ]
        )


def _source(types: TypesLike) -> str:
    return "{" + ", ".join(f"{axis!r}: {t!r}" for axis, t in types.items()) + "}"


def _with_parameters(module: nn.Module, names: Mapping[str, str]) -> Callable[..., Any]:
    def call(**values: Tensor) -> Any:
        own = {name: values.pop(alias) for name, alias in names.items()}
        return torch.func.functional_call(module, own, (), values)

    return call


@st.composite
def _cases(
    draw: st.DrawFn,
    arguments: Sequence[Argument],
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    sizes: Mapping[str, Sequence[int]],
    max_ranks: int,
    max_size: int,
) -> Case:
    axes = sorted({axis for argument in arguments for axis in argument.on})
    mesh: dict[str, int] = {}
    left = max_ranks
    for axis in axes or ["tp"]:
        mesh[axis] = draw(st.integers(1, left))
        left //= mesh[axis]
    dims: dict[str, int] = {}
    bound: dict[str, AxisType] = {}
    cuts: dict[tuple[str, int, str], AxisType] = {}
    seed = draw(st.integers(0, 2**16))
    inputs: dict[str, Placed] = {}
    for argument in arguments:
        shape = tuple(_size(draw, dim, dims, sizes, max_size) for dim in argument.dims)
        types: dict[str, AxisType] = {}
        for axis in mesh:
            pattern = argument.on.get(axis, R)
            if isinstance(pattern, Variable):
                if pattern.name not in bound:
                    options = [R, I, P, *(Shard(d) for d in range(len(shape)))]
                    bound[pattern.name] = draw(st.sampled_from(options))
                pattern = bound[pattern.name]
            types[axis] = _cut(
                draw, pattern, shape, mesh[axis], types, argument, axis, cuts
            )
        inputs[argument.name] = numbers(shape, seeded(seed, argument.name)), types
    return Case(mesh, inputs, _parameters(fn, reference, mesh), seed)


def _size(
    draw: st.DrawFn,
    dim: str,
    known: dict[str, int],
    sizes: Mapping[str, Sequence[int]],
    max_size: int,
) -> int:
    if dim.isdigit():
        return int(dim)
    if dim not in known:
        options = sizes.get(dim, [*range(1, max_size + 1), 0])
        known[dim] = draw(st.sampled_from(list(options)))
    return known[dim]


def _cut(
    draw: st.DrawFn,
    pattern: AxisType,
    shape: tuple[int, ...],
    ranks: int,
    before: Mapping[str, AxisType],
    argument: Argument,
    axis: str,
    cuts: dict[tuple[str, int, str], AxisType],
) -> AxisType:
    """A Shard with an extent; dims of one name are cut alike, as one local size needs."""
    if not isinstance(pattern, Shard) or pattern.extent is not None:
        return pattern
    if not -len(shape) <= pattern.dim < len(shape):
        return R
    dim = pattern.dim % len(shape)
    if any(isinstance(t, Shard) and t.dim == dim for t in before.values()):
        return Shard(dim)  # an inner cut: like torch.chunk of each outer piece
    key = (argument.dims[dim], shape[dim], axis)
    if key not in cuts:
        cuts[key] = Shard(0, draw(extents(total=shape[dim], ranks=ranks)))
    known = cuts[key]
    assert isinstance(known, Shard)
    return Shard(dim, known.extent)


def _parameters(
    fn: Callable[..., Any], reference: Callable[..., Any], mesh: Mapping[str, int]
) -> dict[str, Placed]:
    """The reference's parameters, placed as the module declares them."""
    if not isinstance(fn, nn.Module):
        return {}
    if not isinstance(reference, nn.Module):
        raise ValueError("the reference of a module is a module with equal names")
    found: dict[str, Placed] = {}
    for name, value in reference.named_parameters():
        owner, _, leaf = name.rpartition(".")
        given = declarations(fn.get_submodule(owner)).get(leaf)
        if given is None:
            raise ValueError(f"parameter {name!r} has no declared placement")
        whole = {axis: given.get(axis, R) for axis in mesh}
        found[name] = value.detach().double(), whole
    return found
