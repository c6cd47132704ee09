"""`move_at`: the collectives at the boundary of a module that was written without them."""

import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

from torch import Tensor, nn

from placements.collectives import redistribute
from placements.types.axis import AxisTypeLike

# The type with which a tensor arrives, and the type with which it goes on.
SrcDst: TypeAlias = tuple[AxisTypeLike, AxisTypeLike]


def move_at(
    module: nn.Module,
    axis: str,
    *,
    before: Mapping[str, SrcDst] | None = None,
    after: SrcDst | Mapping[int, SrcDst] | None = None,
) -> None:
    """Redistribute arguments before a module's forward, and its results after it.

    `before` maps the names of arguments of `forward` to (src, dst) on `axis`; an argument
    that a call leaves out, or that is None, is left alone. `after` is (src, dst) for a
    forward that returns one tensor, and maps positions to (src, dst) for one that returns
    several. What a pair of types communicates, forward and backward, is what
    `redistribute(x, axis, src=src, dst=dst)` does; with checking on or off it is the same.
    Raises ValueError if `forward` has no argument of a name.
    """
    signature = inspect.signature(module.forward)
    keywords = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    moves = dict(before or {})
    unknown = [name for name in moves if name not in signature.parameters]
    if unknown and not keywords:
        raise ValueError(
            f"move_at: {type(module).__name__}.forward has no argument {unknown[0]!r}; "
            f"it has {list(signature.parameters)}"
        )

    def enter(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        bound = signature.bind(*args, **kwargs)
        places = [bound.arguments, *(bound.arguments.get(name, {}) for name in keywords)]
        for name, move in moves.items():
            for place in places:
                if place.get(name) is not None:
                    place[name] = _moved(module, name, place[name], axis, move)
        return bound.args, bound.kwargs

    def leave(_: nn.Module, args: Any, result: Any) -> Any:
        if isinstance(after, tuple):
            return _moved(module, "the result", result, axis, after)
        results = list(result)
        for position, move in cast(Mapping[int, SrcDst], after).items():
            what = f"result {position}"
            results[position] = _moved(module, what, results[position], axis, move)
        return type(result)(results)

    if moves:
        module.register_forward_pre_hook(enter, with_kwargs=True)
    if after:
        module.register_forward_hook(leave)


def _moved(module: nn.Module, what: str, x: Any, axis: str, move: SrcDst) -> Tensor:
    if not isinstance(x, Tensor):
        raise ValueError(
            f"move_at: {what} of {type(module).__name__} is to be a tensor, got "
            f"{type(x).__name__}; of several results, say which: after={{0: (src, dst)}}"
        )
    return redistribute(x, axis, src=move[0], dst=move[1])
