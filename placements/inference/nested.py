"""Arguments inside lists, tuples, dicts and slices: find them, and change each of them."""

from collections.abc import Callable, Iterator
from typing import Any, cast

# What holds other arguments; of anything else there is no need to ask here.
NESTS = (list, tuple, dict, slice)


def leaves(value: Any) -> Iterator[Any]:
    """Yield what lists, tuples, dicts and slices hold, in order of appearance."""
    if isinstance(value, slice):
        value = _ends(value)
    elif isinstance(value, dict):
        value = tuple(cast(Any, value).values())
    if isinstance(value, list | tuple):
        for item in cast(Any, value):
            if isinstance(item, NESTS):
                yield from leaves(item)
            else:
                yield item
    else:
        yield value


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return the same lists, tuples and slices, each value in them changed."""
    if isinstance(value, slice):
        return slice(*(mapped(change, end) for end in _ends(value)))
    if isinstance(value, list | tuple):
        items = [mapped(change, item) for item in cast(Any, value)]
        return items if isinstance(value, list) else tuple(items)
    return change(value)


def _ends(value: Any) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step
