"""What stands for an argument of a call in the key of the memo, and no tensor with it.

A key holds every fact that inference reads: of a tensor its type, shape and dtype, of a
number that belongs to an axis also that, and of other arguments the class and the value.
"""

from types import EllipsisType, NoneType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from placements.inference.numbers import (
    RANK_NUMBERS,
    Facts,
    FactsIdentity,
    RankNumber,
    plain,
)
from placements.runtime import tags
from placements.runtime.errors import type_or_error
from placements.runtime.filled import is_behind
from placements.types.tensor import identity_of

# What stands for itself in a key, beside its class (True is not 1).
PLAIN = frozenset({int, bool, str, NoneType, EllipsisType, torch.dtype, torch.device})
# Classes of tensors, which `isinstance` asks their metaclass for.
TENSORS = frozenset({Tensor, nn.Parameter})
_seen_of = tags.seen_of
_BOUNDS = frozenset({int, NoneType})
_is_all_int = frozenset({int}).issuperset


def key_of(arg: Any) -> tuple[Any, ...]:
    """What inference sees of an argument, hashable; what is frequent is asked first."""
    kind = arg.__class__
    if kind in PLAIN:
        return kind, arg
    if kind is float:
        return kind, not arg  # of a number only this matters to types, as a rule
    if kind is tuple or kind is list:
        return (kind, *arg) if _is_all_int(map(type, arg)) else _key_of_items(kind, arg)
    if kind is slice:
        start, stop, step = bounds = arg.start, arg.stop, arg.step
        if start.__class__ in _BOUNDS and stop.__class__ in _BOUNDS:
            if step.__class__ in _BOUNDS:
                return kind, start, stop, step
        return kind, key_of(bounds)
    if kind in RANK_NUMBERS:
        return arg.key or _key_of_number(arg)
    if kind in TENSORS or isinstance(arg, Tensor):
        try:
            return _seen_of(arg)
        except AttributeError:
            return seen_anew(arg, "an op")
    if isinstance(arg, list | tuple):
        return _key_of_items(kind, cast(Any, arg))
    if kind.__hash__ is None:
        return kind, object()  # an array of numpy, say: no other call has this key
    return (float, not arg) if isinstance(arg, float) else (kind, arg)


def seen_anew(x: Tensor, where: str) -> tags.Seen:
    """What inference sees of a tensor without a type, or whose type is fresh or new."""
    known = tags.get(x)
    if known is not None and known.fresh is not None and is_behind(x):
        known = type_or_error(x, where)
    identity = None if known is None else known.identity or identity_of(known)
    return identity, x.shape, x.dtype


_MOST_FACTS = 4096
_facts: dict[Facts, FactsIdentity] = {}


def _key_of_number(number: RankNumber) -> tuple[Any, ...]:
    """What stands for the number, kept with the number."""
    facts = number.facts
    identity = _facts.get(facts)
    if identity is None:
        if len(_facts) >= _MOST_FACTS:
            _facts.clear()  # calls with equal facts are then inferred once more
        identity = _facts[facts] = FactsIdentity(facts)
    number.key = identity, number.__class__, plain(number)
    return number.key


def _key_of_items(kind: Any, items: Any) -> tuple[Any, ...]:
    """The parts of a list or a subscript; each begins with a class, or is a tuple."""
    key: list[Any] = [kind]
    for item in items:
        kind = item.__class__
        if kind in PLAIN:
            key += kind, item
        elif kind in RANK_NUMBERS and item.key is not None:
            key.append(item.key)
        else:
            key.append(key_of(item))
    return tuple(key)


class WithNumbers(NamedTuple):
    """The type of a call whose arguments after the first are numbers that know their axes.

    A function of torch in C gets them as plain numbers, which it takes much faster.
    """

    type: Any
    plain: tuple[Any, ...]


def as_plain(arg: Any) -> Any:
    """The argument without what its numbers know of their axes."""
    if isinstance(arg, slice):
        bounds = cast(Any, arg)
        return slice(*map(as_plain, (bounds.start, bounds.stop, bounds.step)))
    if isinstance(arg, list | tuple):
        items: list[Any] = [as_plain(item) for item in cast(Any, arg)]
        return items if isinstance(arg, list) else tuple(items)
    return plain(arg)


def is_in_key(arg: Any) -> bool:
    """Return whether the key of a call holds the argument whole, and not only its kind.

    Only then another call with the same key has the same argument. Of a float the key holds
    whether it is 0.
    """
    if isinstance(arg, slice):
        bounds = cast(Any, arg)
        return is_in_key((bounds.start, bounds.stop, bounds.step))
    if isinstance(arg, list | tuple):
        return all(is_in_key(item) for item in cast(Any, arg))
    return arg.__class__ in PLAIN or arg.__class__ in RANK_NUMBERS


class Kept(NamedTuple):
    """The type of a call that takes more than to run it and to tag one result."""

    type: Any
