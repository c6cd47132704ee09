"""Begin and end checking: the state, the mode on torch's stack, and the patches, together.

Whatever raises on the way in or out (a torch that lacks something, Ctrl-C, a test's alarm),
torch is as it was before, and the next block works. Blocks may nest, run in many threads
and tasks, and be left in another order than they were entered.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from placements import _torch
from placements.checker import patches
from placements.checker.patches import Replacements
from placements.runtime.blocks import Block, Steps, together
from placements.runtime.state import Checker, OpenBlock, block_here, checkers, innermost

C = TypeVar("C", bound=Checker)

_open: set[OpenBlock] = set()
_in_place: list[Replacements] = []
_version = [0]  # of what stands above; every change replaces it

Calls = list[Callable[[], Any]]


def _change(planned: Callable[[], Calls]) -> None:
    """Make the calls that `planned` returns, together, if nothing changed meanwhile.

    There is no lock. A signal may come at any time, also before a lock is released, and its
    handler may open a block of its own.
    """
    begun: list[bool] = []
    while not begun:
        version = _version[0]
        try:
            calls = planned()
            together([
                partial(_version.remove, version), partial(_version.append, version + 1),
                partial(begun.append, True), *calls,
            ])()  # fmt: skip
        except Exception:
            if begun or version in _version:
                raise  # else another thread, or a handler, made a change meanwhile


def opened(mode: C) -> Steps[C]:
    """Take the steps of a block that checks with `mode`."""
    _torch.require("checking")
    block = OpenBlock(mode, block_here.get())
    left: list[bool] = []
    try:
        _change(partial(_entering, block))
        yield mode
    finally:
        block.is_open = False
        try:
            _change(partial(_leaving, block, left))
        finally:
            # A signal may have stopped the first. If a second signal stops this one too,
            # the next block that begins or ends does it.
            if not left:
                _change(partial(_leaving, block, left))


def _entering(block: OpenBlock) -> Calls:
    others = _others(block)
    calls = _kept(others, block)
    if not _in_place:
        plan = patches.plan()
        calls.append(partial(_in_place.append, plan))
        calls.extend(plan.install)
    if block.mode not in [other.mode for other in others]:
        calls.append(partial(_torch.push_mode, block.mode))
    calls.append(partial(block_here.set, block))
    return calls


def _others(block: OpenBlock) -> set[OpenBlock]:
    """Return the open blocks, without one that a second signal kept from leaving."""
    return {other for other in _open.copy() if other.is_open and other is not block}


def _kept(others: set[OpenBlock], *entered: OpenBlock) -> Calls:
    """Let these blocks be the open ones, and no mode of another one be on the stack."""
    blocks = others.union(entered)
    return [
        partial(_open.update, blocks),
        partial(_open.intersection_update, blocks),
        partial(setattr, checkers, "count", len(blocks)),
        *_taken_off_the_stack(others),
    ]


def _leaving(block: OpenBlock, left: list[bool]) -> Calls:
    others = _others(block)
    calls = _kept(others)
    calls.append(partial(block_here.set, innermost(block_here.get())))
    if not others and _in_place:
        calls.extend(_in_place[0].undo())
        calls.append(_in_place.clear)
    calls.append(partial(left.append, True))
    return calls


def _taken_off_the_stack(others: set[OpenBlock]) -> Calls:
    """Pop the modes of this thread that no open block uses; other modes stay in order.

    A block that was left in another thread has left its mode here. It does nothing, and
    goes when the next block begins or ends.
    """
    used: set[Any] = {block.mode for block in others}
    stack = _torch.modes()
    kept: list[Any] = [m for m in stack if not isinstance(m, Block) or m in used]
    same = 0
    while same < len(kept) and kept[same] is stack[same]:
        same += 1
    pops: Calls = [_torch.pop_mode] * (len(stack) - same)
    return [*pops, *(partial(_torch.push_mode, mode) for mode in kept[same:])]
