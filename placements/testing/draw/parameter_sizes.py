"""The sizes that a module's annotated parameters give to the letters of their dims.

With `w_DF: Annotated[Float[Tensor, "D F"], On(...)]` in the class, a `forward` that takes
`Float[Tensor, "T D"]` takes rows of that many columns, and no others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, get_type_hints

from torch import Tensor, nn

from placements.annotations.checks import is_array
from placements.testing.draw.arguments import parts_of

# The sizes that parameters give to one letter, by the name of the parameter.
SizesByName = dict[str, int]


@dataclass(frozen=True)
class ParameterSizes:
    """letter -> sizes: by the module's own parameters, and by those of modules inside.

    A letter means in `forward` what it means among the module's own parameters. A module
    inside may use it for something else, so that it only counts where the own ones are
    silent.
    """

    own: dict[str, SizesByName] = field(default_factory=dict[str, SizesByName])
    inside: dict[str, SizesByName] = field(default_factory=dict[str, SizesByName])

    def of(self, letter: str) -> int | None:
        """Return the size of a letter; None if no parameter names it.

        Raises ValueError if parameters give it several sizes.
        """
        said = self.own.get(letter) or self.inside.get(letter)
        if not said:
            return None
        (first, size), *others = said.items()
        for name, other in others:
            if other != size:
                raise ValueError(
                    f"dim {letter!r} is {size} in parameter {first!r} but {other} in "
                    f"{name!r}: give one of them another letter"
                )
        return size


def parameter_sizes(
    module: object, shapes: Mapping[str, Sequence[int]] | None = None
) -> ParameterSizes:
    """Return the sizes in a module; `shapes`, by full names, replace its own."""
    found = ParameterSizes()
    if isinstance(module, nn.Module):
        for name, dims, held in _annotated(module):
            shape = (shapes or {}).get(name, held)
            letters = found.inside if "." in name else found.own
            for dim, size in zip(dims, shape, strict=False):
                if dim.isidentifier():
                    letters.setdefault(dim, {})[name] = size
    return found


def annotated_dims(module: object) -> dict[str, list[str]]:
    """Return the letters of the annotated tensors of a module, by their full names."""
    if not isinstance(module, nn.Module):
        return {}
    return {name: dims for name, dims, _ in _annotated(module)}


def _annotated(module: nn.Module) -> Iterator[tuple[str, list[str], tuple[int, ...]]]:
    """Yield the full name, dims and shape of every tensor whose class annotates it."""
    modules: Iterator[tuple[str, nn.Module]] = cast(Any, module).named_modules()
    for path, owner in modules:
        for leaf, hint in get_type_hints(type(owner), include_extras=True).items():
            value = getattr(owner, leaf, None)
            arrays = [part for part in parts_of(hint) if is_array(part)]
            if not arrays or not isinstance(value, Tensor):
                continue
            dims = str(arrays[0].dim_str).split()
            # After "*batch" or "..." it is not known which dim is meant.
            many = [k for k, dim in enumerate(dims) if dim.startswith(("*", "..."))]
            name = f"{path}.{leaf}" if path else leaf
            yield name, dims[: many[0]] if many else dims, tuple(value.shape)
