"""One call of one collective: what it moves, and what the ranks must agree on.

Data moves with plain tensor operations; process groups are not known here. What
gloo accepts and then silently gets wrong is refused.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from placements.testing.failures import Line, shown_line
from placements.testing.lockstep import Lockstep

Tensors = list[Tensor]

_LAYOUT = ("dtype", "shape", "strides")
_Kind: Any = cast(Any, dist.ReduceOp).RedOpType
_BITWISE = (_Kind.BAND, _Kind.BOR, _Kind.BXOR)
_FOLDS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    _Kind.SUM: torch.add,
    _Kind.AVG: torch.add,
    _Kind.PRODUCT: torch.mul,
    _Kind.MIN: torch.minimum,
    _Kind.MAX: torch.maximum,
    _Kind.BAND: torch.bitwise_and,
    _Kind.BOR: torch.bitwise_or,
    _Kind.BXOR: torch.bitwise_xor,
}


@dataclass(eq=False)
class Call:
    """One rank's call of one collective.

    `agree` must be equal on all ranks of the group, `own` may differ. `exchange` moves
    the data, given the calls of all ranks by group rank; it may complain instead.
    """

    name: str
    inputs: Tensors
    outputs: Tensors
    exchange: Callable[[list["Call"]], str | None] = lambda calls: None
    agree: dict[str, object] = field(default_factory=dict[str, object])
    own: dict[str, object] = field(default_factory=dict[str, object])
    shown: Tensors = field(default_factory=list[Tensor])
    rank: int = -1
    ranks: list[int] = field(default_factory=list[int])
    line: Line = ("", 0)
    done: bool = False
    source: int = -1

    def describe(self) -> str:
        values = {k: v for k, v in self.agree.items() if k not in _LAYOUT} | self.own
        tensors = map(shown, self.shown or self.inputs or self.outputs)
        content = ", ".join([*tensors, *(f"{k}={v}" for k, v in values.items())])
        where = shown_line(self.line)
        return f"{self.name}({content}) on group {self.ranks}  at {where}"

    def difference(self, other: "Call") -> str | None:
        """What keeps the two calls from being the same collective."""
        if self.name != other.name:
            what = f"{self.name} on rank {self.rank}, {other.name} on rank {other.rank}"
            return f"different collectives: {what}"
        both = self.agree | other.agree
        keys = [k for k in both if self.agree.get(k) != other.agree.get(k)]
        where = f"ranks {self.rank} and {other.rank}"
        return f"{where}: different {', '.join(keys)} in {self.name}" if keys else None

    def check_density(self) -> None:
        """Refuse what real backends would read as if it had no gaps."""
        for tensor in (*self.shown, *self.inputs, *self.outputs):
            if tensor.is_contiguous():
                continue
            # preserve_format keeps the strides of a tensor without gaps, and no other.
            dense = torch.empty_like(tensor).stride() == tensor.stride()
            text = f"{shown(tensor)} with strides {tensor.stride()} has gaps"
            require(dense, f"{text}; use .contiguous()")


def shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def alike(tensors: Tensors, in_place: bool = False) -> dict[str, object]:
    """What ranks must agree on when their tensors are to be alike."""
    agree: dict[str, object] = {"dtype": [t.dtype for t in tensors]}
    agree["shape"] = [tuple(t.shape) for t in tensors]
    # Real backends copy memory, not elements: the order of dims must be the same.
    if in_place and not all(t.is_contiguous() for t in tensors):
        agree["strides"] = [t.stride() for t in tensors]
    return agree


def reduction(op: Any, tensors: Tensors) -> dict[str, object]:
    """What ranks must agree on when they reduce; refuses what gloo refuses."""
    kind = op.op
    require(kind in _FOLDS, f"the simulator has no {kind.name}")
    for tensor in tensors:
        exact = not (tensor.is_floating_point() or tensor.is_complex())
        require(exact or kind not in _BITWISE, f"{kind.name} of {tensor.dtype}")
        require(not exact or kind != _Kind.AVG, f"AVG of {tensor.dtype}")
    return {"op": kind.name}


def reduced(op: Any, tensors: Sequence[Tensor]) -> Tensor:
    # In rank order and in the tensors' own dtype, as a ring would.
    total = functools.reduce(_FOLDS[op.op], tensors)
    return total / len(tensors) if op.op == _Kind.AVG else total


def write(place: Tensor, value: Tensor) -> None:
    # `.data`: a backend writes to memory, which autograd's version counter misses.
    place.data.copy_(value.reshape(place.shape))


def check_places(places: Tensors, values: Tensors) -> None:
    for place, value in zip(places, values, strict=True):
        fits = place.dtype == value.dtype and place.numel() == value.numel()
        require(fits, f"no room for {shown(value)} in {shown(place)}")


def pieces(tensor: Tensor, count: int, splits: Sequence[int] = ()) -> Tensors:
    what = shown(tensor)
    require(tensor.dim() > 0 and tensor.is_contiguous(), f"{what} is not contiguous")
    require(bool(splits) or tensor.shape[0] % count == 0, f"{what} / {count} ranks")
    sizes = list(splits) or [tensor.shape[0] // count] * count
    fit = len(sizes) == count and sum(sizes) == tensor.shape[0]
    require(fit, f"splits {sizes} of {what} on {count} ranks")
    return list(tensor.split_with_sizes(sizes))


def by_rank(tensors: Tensors, count: int) -> list[Tensors]:
    cut = [pieces(tensor, count) for tensor in tensors]
    return [list(of_rank) for of_rank in zip(*cut, strict=True)]


def all_gather(name: str, outputs: list[Tensors], inputs: Tensors) -> Call:
    """`outputs[i]` are the places for the inputs of rank i."""

    def exchange(calls: list[Call]) -> None:
        sent = [tensor for call in calls for tensor in call.inputs]
        for call in calls:
            for place, value in zip(call.outputs, sent, strict=True):
                write(place, value)

    for of_rank in outputs:
        check_places(of_rank, inputs)
    flat = [tensor for of_rank in outputs for tensor in of_rank]
    return Call(name, inputs, flat, exchange, alike(inputs))


def reduce_scatter(name: str, outputs: Tensors, inputs: list[Tensors], op: Any) -> Call:
    """`inputs[i]` is what this rank adds to the outputs of rank i."""

    def exchange(calls: list[Call]) -> None:
        places = [place for call in calls for place in call.outputs]
        for index, place in enumerate(places):
            write(place, reduced(op, [call.inputs[index] for call in calls]))

    for of_rank in inputs:
        check_places(outputs, of_rank)
    flat = [tensor for of_rank in inputs for tensor in of_rank]
    return Call(name, flat, outputs, exchange, alike(outputs) | reduction(op, flat))


def unequal(send: Call, sent: Tensor, recv: Call, place: Tensor) -> str | None:
    if (sent.dtype, sent.shape) == (place.dtype, place.shape):
        return None
    who = f"rank {send.rank} sends {shown(sent)} to rank {recv.rank}"
    return f"{who}, which expects {shown(place)}"


def swap(calls: list[Call]) -> str | None:
    """The exchange of all_to_all: input j of rank i becomes output i of rank j."""
    for j, recv in enumerate(calls):
        for send, place in zip(calls, recv.outputs, strict=True):
            if complaint := unequal(send, send.inputs[j], recv, place):
                return complaint
    for j, recv in enumerate(calls):
        for send, place in zip(calls, recv.outputs, strict=True):
            write(place, send.inputs[j])
    return None


class SimWork(dist.Work):
    """The handle of calls; `wait` gives the baton away until they are done."""

    def __init__(self, lockstep: Lockstep, calls: list[Call]) -> None:
        super().__init__()
        self._lockstep = lockstep
        self._calls = calls

    def wait(self, timeout: object = None) -> bool:
        for call in self._calls:
            self._lockstep.wait(call.rank, call)
        return True

    def is_completed(self) -> bool:
        return all(call.done for call in self._calls)

    def result(self) -> Tensors:
        return [tensor for call in self._calls for tensor in call.outputs]

    def get_future(self) -> Any:
        # C++ waits for a future without the baton, so it must be done by then.
        self.wait()
        future = cast(Any, torch.futures.Future)()
        future.set_result(self.result())
        return future

    def _source_rank(self) -> int:
        return self._calls[0].ranks.index(self._calls[0].source)


class Simulation:
    """What the ranks of one simulated world share: calls that are not complete."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.lockstep = lockstep
        self.queues: dict[object, list[deque[Call]]] = {}
        self.letters: dict[object, list[Call]] = {}

    def clear(self) -> None:
        self.queues.clear()
        self.letters.clear()

    def unmatched(self) -> list[Call]:
        queues = [queue for of_group in self.queues.values() for queue in of_group]
        return [c for calls in (*queues, *self.letters.values()) for c in calls]
