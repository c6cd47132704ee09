"""Where a number that belongs to mesh axes was asked for a plain answer: a branch.

`if rank == 0:`, `while i < x.shape[0]:`, `{0: a}[rank]`. Types do not follow the answer, so
ranks may do different things after it and every type still fit. The last such questions are
kept, and whoever finds that ranks part says where they did. `int(rank)` and `float(rank)`
are refused: what they give is computed with as a number that is equal on all ranks.
"""

import ast
import inspect
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dis import opname
from functools import wraps
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, cast

import jaxtyping
import numpy as np
from torch import nn

from placements._torch import is_unseen
from placements.inference import number_operands, numbers
from placements.inference.number_operands import chosen_from, is_either, of_own
from placements.inference.numbers import (
    RANK_NUMBERS,
    RankNumber,
    facts_of,
    numbers_in,
    shown,
)
from placements.runtime.callsite import is_library, user_frame
from placements.runtime.errors import refused_call
from placements.runtime.source import code_of, expression_at
from placements.runtime.state import current

_JAXTYPING = os.path.dirname(jaxtyping.__file__) + os.sep
# torch computes here how far initial values spread: by the sizes of the whole tensor.
_INIT = nn.init.__file__
# Whoever calls these asks.
_PASSED_OVER = (
    __file__, numbers.__file__, number_operands.__file__,
    os.path.dirname(np.__file__) + os.sep,
)  # fmt: skip

_MOST_PLACES = 32
_MOST_ANSWERS = 256  # of one place: a loop may ask for ever


class Forgotten(NamedTuple):
    """One question: where it stands in the code, of which number, and on which axes."""

    where: str  # file:line
    text: str  # `axis_rank('tp') == 0`, as the program writes it
    number: str  # what the number is
    axes: tuple[str, ...]

    def __str__(self) -> str:
        axes = ", ".join(map(repr, self.axes))
        named = "" if self.number in self.text else f", of {self.number}"
        return f"{self.where}: {self.text} (axis {axes}{named})"


_Place = tuple[CodeType, int, str]  # code, instruction, question

_NO_LISTS: "OrderedDict[_Place, tuple[Forgotten, list[Any]]]" = OrderedDict()
_asked: ContextVar["OrderedDict[_Place, tuple[Forgotten, list[Any]]] | None"] = ContextVar(
    "placements_asked", default=None
)


# any_questions(): None or empty while the code that runs here has asked nothing.
any_questions = _asked.get


def forget_questions() -> None:
    """Begin anew: a rank starts another program."""
    _asked.set(OrderedDict())


def questions() -> dict[Forgotten, list[Any]]:
    """Return the last questions of the code that runs here, each with its answers."""
    return dict((_asked.get() or _NO_LISTS).values())


def _told(number: RankNumber, question: str, answer: Any) -> None:
    _note(number, question, answer, _asking() if current.mode is not None else None)


def note_read(number: RankNumber, answer: bool) -> None:
    """Note that the program reads a bool from a tensor that differs by rank."""
    _note(number, "is read", answer, user_frame())


def _note(number: RankNumber, question: str, answer: Any, frame: FrameType | None) -> None:
    """Keep a question that the program asks, and tell the observer of the block."""
    mode = current.mode
    if mode is None or frame is None:
        return
    asked = _asked.get()
    if asked is None:
        _asked.set(asked := OrderedDict())
    place = frame.f_code, frame.f_lasti, question
    known = asked.get(place)
    if known is None:
        found = _described(frame, number, question)
        if found is None:
            return
        known = asked[place] = found, []
        if len(asked) > _MOST_PLACES:
            asked.popitem(last=False)
    elif len(asked) > 1:
        asked.move_to_end(place)
    if len(known[1]) < _MOST_ANSWERS:
        known[1].append(answer)
    if mode.observer is not None:
        mode.observer.asked(known[0], answer)


def _asking(but: str = "") -> FrameType | None:
    """Return the frame that asks, unless it is of this package, of torch or of jaxtyping.

    They ask for shapes that they compare, and choose no path of the program by them; `but`
    is a file of theirs that may not either.
    """
    frame = inspect.currentframe()
    assert frame is not None
    frame = frame.f_back
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
        frame = frame.f_back
    if frame is None:
        return None
    file = frame.f_code.co_filename
    is_theirs = is_library(file) or file.startswith(_JAXTYPING)
    return None if is_theirs and file != but else frame


def _ordered(number: RankNumber, other: Any) -> None:
    """Refuse sorted, and max by a key, where it would depend on the rank what comes out.

    They return one of the numbers, and that number says where it belongs, not where the
    other one does. In the program such a comparison is a call and no `<`.
    """
    if current.mode is None or is_either(number.facts, facts_of(other)):
        return
    frame = _asking()
    if frame is None or not _is_calling(frame):
        return
    node = expression_at(frame.f_code, frame.f_lasti)
    called = _called(node) or "max or min"
    written = None if node is None else code_of(node)
    one, two = shown(number), shown(other) if facts_of(other).letters else repr(other)
    raise refused_call(
        called,
        f"{written or called} chooses between {one} and {two}",
        name=number.facts.origin,
        axis=next(
            (axis for axis, _ in (*number.facts.letters, *facts_of(other).letters)), None
        ),
        rule="the chosen number would belong to an axis on some ranks and not on others, "
        "and the largest sum is no sum of the largest summands",
        advice="np.maximum(a, b) or np.minimum(a, b), which is each rank's own number; or "
        "choose between sizes over all ranks: global_size(x, dim)",
    )


def _made_plain(number: RankNumber, kind: str) -> None:
    """Refuse `int(n)`, `float(n)`, `np.int64(n)`: nobody could tell the result apart.

    `x.sum() / float(x.shape[0])` would divide by the size of a piece, and its type would be
    that of a division by the whole size. A text may be made of the number.
    """
    if current.mode is None or is_unseen() or (frame := _asking(but=_INIT)) is None:
        return
    node = expression_at(frame.f_code, frame.f_lasti)
    if _only_prints(node):
        return
    written = (None if node is None else code_of(node)) or f"{kind}(...)"
    raise refused_call(
        _called(node) or kind,
        f"{written} makes a plain number of {shown(number)}",
        name=number.facts.origin,
        axis=next((axis for axis, _ in number.facts.letters), None),
        rule="a number that differs by rank, or is the size of a piece, must not be taken "
        "for a number of the whole",
        advice="the number as it is, which torch and Python's arithmetic take (n / 2, n ** "
        "0.5, math.trunc(n)); for the size over all ranks global_size(x, dim); for a log, "
        "or for data that you declare, `with unchecked():`",
    )


def _is_calling(frame: FrameType) -> bool:
    """Return whether the frame is at a call; memory of the interpreter stands behind it."""
    code, at = frame.f_code.co_code, frame.f_lasti
    while at > 0 and opname[code[at]] == "CACHE":
        at -= 2
    return opname[code[at]].startswith("CALL")


def of_all_axes(choose: Any) -> Any:
    """`max` or `min` whose result knows the axes of all numbers it was chosen from."""

    @wraps(choose)
    def of_all_axes(*args: Any, **options: Any) -> Any:
        if len(args) == 1:
            args = (list(args[0]),)  # it may be iterated over only once
        given = args[0] if len(args) == 1 else args
        for one in given:
            if one.__class__ in RANK_NUMBERS:
                break
        else:
            return choose(*args, **options)
        are_numbers = all(isinstance(one, int | float) for one in given)
        if current.mode is None or "key" in options or not are_numbers:
            return choose(*args, **options)
        return chosen_from(choose, list(given))

    return of_all_axes


# Python calls a method of the number for these, which keeps its axes.
_BY_METHODS = frozenset({"ceil", "floor", "trunc", "prod"})
# The functions of `math` that read the value of a number, of which its class hears nothing.
OF_MATH = tuple(
    name
    for name, function in vars(math).items()
    if callable(function) and name[0] != "_" and name not in _BY_METHODS
)


def of_own_numbers(function: Any) -> Any:
    """A function of `math` whose result knows the axes of the numbers it is made of."""

    @wraps(function)
    def of_own_numbers(*args: Any, **options: Any) -> Any:
        if current.mode is not None:
            # It may be iterated over only once: math.fsum.
            args = tuple(list(cast(Any, a)) if isinstance(a, Iterator) else a for a in args)
            if next(numbers_in(args), None) is not None:
                return of_own(function, args, options)
        return function(*args, **options)

    return of_own_numbers


# Functions whose result keeps the axes, or that only print.
_HARMLESS = frozenset("min max sorted sort print str repr format format_map".split())


def _described(frame: FrameType, number: RankNumber, question: str) -> Forgotten | None:
    """Return the question as the program writes it; None for one that changes nothing."""
    node = expression_at(frame.f_code, frame.f_lasti)
    if _only_prints(node):
        return None
    written = None if node is None else code_of(node)
    text = written or f"{number.facts.origin} {question}"
    where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    axes = tuple(axis for axis, _ in number.facts.letters)
    return Forgotten(where, text, number.facts.origin, axes)


def _only_prints(node: ast.AST | None) -> bool:
    """Return whether an expression prints the number, or keeps its axes."""
    if _called(node) in _HARMLESS and not _chooses_others(node):
        return True
    return isinstance(node, ast.JoinedStr | ast.FormattedValue) or _is_text(node)


def _called(node: ast.AST | None) -> str | None:
    """Return the name of the function that an expression calls."""
    if not isinstance(node, ast.Call) or not isinstance(
        node.func, ast.Name | ast.Attribute
    ):
        return None
    return node.func.id if isinstance(node.func, ast.Name) else node.func.attr


def _chooses_others(node: ast.AST | None) -> bool:
    """Return whether the numbers are keys of what is chosen: `max(parts, key=...)`."""
    return isinstance(node, ast.Call) and any(word.arg == "key" for word in node.keywords)


def _is_text(node: ast.AST | None) -> bool:
    """Return whether it formats a text: `"%d rows" % n`, or `msg % args` of a log.

    `m % n` of two numbers asks nothing, so a question at this sign is that of a text.
    """
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)


numbers.listener.told = _told
numbers.listener.ordered = _ordered
numbers.listener.made_plain = _made_plain


def asked_before(axis: str | None) -> str:
    """Return the last question about this axis in the function of the user's code."""
    frame = user_frame()
    if axis is None or frame is None:
        return ""
    for place, (found, answers) in reversed((_asked.get() or _NO_LISTS).items()):
        if place[0] is frame.f_code and axis in found.axes and answers:
            return f"{found} was {answers[-1]!r} on this rank, and types do not follow it"
    return ""


def partings(by_rank: Mapping[int, Mapping[Forgotten, Sequence[Any]]]) -> Iterator[str]:
    """Yield what ranks asked alike and answered differently, and who said what."""
    for found in dict.fromkeys(found for asked in by_rank.values() for found in asked):
        answers = {rank: asked[found] for rank, asked in by_rank.items() if found in asked}
        for row in zip(*answers.values(), strict=False):
            if any(answer != row[0] for answer in row):
                yield parted(found, dict(zip(answers, row, strict=True)))
                break


def parted(found: Forgotten, answers: Mapping[int, Any]) -> str:
    """`file:line: rank == 0 (axis 'tp') is True on rank 0, False on ranks 1, 2`."""
    ranks: dict[str, list[int]] = {}
    for rank, answer in answers.items():
        ranks.setdefault(repr(answer), []).append(rank)
    said = [
        f"{answer} on rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}"
        for answer, who in ranks.items()
    ]
    return f"{found} is {', '.join(said[:4])}{', ...' * (len(said) > 4)}"
