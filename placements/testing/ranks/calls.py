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

from placements.testing.ranks.failures import SourceLine, shown_line
from placements.testing.ranks.scheduler import Scheduler

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
class SimCall:
    """One rank's call of one collective.

    `agree` must be equal on all ranks of the group, `own` may differ. `exchange` moves
    the data, given the calls of all ranks by group rank; it may complain instead.
    """

    name: str
    inputs: Tensors
    outputs: Tensors
    exchange: Callable[[list["SimCall"]], str | None] = lambda calls: None
    agree: dict[str, object] = field(default_factory=dict[str, object])
    own: dict[str, object] = field(default_factory=dict[str, object])
    shown: Tensors = field(default_factory=list[Tensor])
    rank: int = -1
    ranks: list[int] = field(default_factory=list[int])
    line: SourceLine = ("", 0)
    done: bool = False
    source: int = -1

    def describe(self) -> str:
        values = {k: v for k, v in self.agree.items() if k not in _LAYOUT} | self.own
        tensors = map(shown, self.shown or self.inputs or self.outputs)
        content = ", ".join([*tensors, *(f"{k}={v}" for k, v in values.items())])
        where = shown_line(self.line)
        return f"{self.name}({content}) on group {self.ranks}  at {where}"

    def difference(self, other: "SimCall") -> str | None:
        """Return what keeps the two calls from being the same collective."""
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
            check_layout(tensor)
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


def check_layout(tensor: Tensor) -> None:
    dense = tensor.layout == torch.strided
    text = f"{shown(tensor)} is {str(tensor.layout).removeprefix('torch.')}"
    require(dense, f"{text}; simulated ranks exchange dense tensors: use .to_dense()")


def check_count(name: str, what: str, tensors: Sequence[object], count: int) -> None:
    text = f"{name} expects {count} {what}, one per rank of its group"
    require(len(tensors) == count, f"{text}; got {len(tensors)}")


def alike(tensors: Tensors, in_place: bool = False) -> dict[str, object]:
    """Return what ranks must agree on when their tensors are to be alike."""
    for tensor in tensors:
        check_layout(tensor)
    agree: dict[str, object] = {"dtype": [t.dtype for t in tensors]}
    agree["shape"] = [tuple(t.shape) for t in tensors]
    # Real backends copy memory, not elements: the order of dims must be the same.
    if in_place and not all(t.is_contiguous() for t in tensors):
        agree["strides"] = [t.stride() for t in tensors]
    return agree


def reduction(op: Any, tensors: Tensors) -> dict[str, object]:
    """Return what ranks must agree on when they reduce; refuses what gloo refuses."""
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


def check_places(name: str, places: Tensors, values: Tensors) -> None:
    same = len(places) == len(values)
    require(same, f"{name} got {len(values)} inputs for {len(places)} outputs")
    for place, value in zip(places, values, strict=True):
        fits = place.dtype == value.dtype and place.numel() == value.numel()
        text = f"{name}: output {shown(place)} does not fit input {shown(value)}"
        require(fits, f"{text}; dtype and number of elements must be the same")


def pieces(name: str, tensor: Tensor, count: int, splits: Sequence[int] = ()) -> Tensors:
    """Return what each of `count` ranks gets of `tensor`, cut along its first dim."""
    check_layout(tensor)
    what = shown(tensor)
    require(tensor.dim() > 0, f"{name} cuts dim 0 of its tensors; {what} has no dims")
    require(tensor.is_contiguous(), f"{name}: {what} is not contiguous")
    rows = tensor.shape[0]
    if splits:
        check_count(name, "split sizes", splits, count)
        fit = sum(splits) == rows
        require(fit, f"{name}: splits {list(splits)} do not add up to dim 0 of {what}")
        return list(tensor.split_with_sizes(list(splits)))
    even = rows % count == 0
    require(even, f"{name} cuts dim 0 of {what} into {count} equal parts, one per rank")
    return list(tensor.split_with_sizes([rows // count] * count))


def by_rank(name: str, tensors: Tensors, count: int) -> list[Tensors]:
    cut = [pieces(name, tensor, count) for tensor in tensors]
    return [list(of_rank) for of_rank in zip(*cut, strict=True)]


def all_gather(name: str, outputs: list[Tensors], inputs: Tensors) -> SimCall:
    """Return the call; `outputs[i]` are the places for the inputs of rank i."""

    def exchange(calls: list[SimCall]) -> None:
        sent = [tensor for call in calls for tensor in call.inputs]
        for call in calls:
            for place, value in zip(call.outputs, sent, strict=True):
                write(place, value)

    for of_rank in outputs:
        check_places(name, of_rank, inputs)
    flat = [tensor for of_rank in outputs for tensor in of_rank]
    return SimCall(name, inputs, flat, exchange, alike(inputs))


def reduce_scatter(
    name: str, outputs: Tensors, inputs: list[Tensors], op: Any, rank: int
) -> SimCall:
    """Return the call; `inputs[i]` is what this rank adds to the outputs of rank i."""

    def exchange(calls: list[SimCall]) -> None:
        places = [place for call in calls for place in call.outputs]
        for index, place in enumerate(places):
            write(place, reduced(op, [call.inputs[index] for call in calls]))

    check_places(name, outputs, inputs[rank])
    flat = [tensor for of_rank in inputs for tensor in of_rank]
    return SimCall(name, flat, outputs, exchange, alike(flat) | reduction(op, flat))


def unequal(send: SimCall, sent: Tensor, recv: SimCall, place: Tensor) -> str | None:
    if (sent.dtype, sent.shape) == (place.dtype, place.shape):
        return None
    who = f"rank {send.rank} sends {shown(sent)} to rank {recv.rank}"
    return f"{who}, which expects {shown(place)}"


def swap(calls: list[SimCall]) -> str | None:
    """Exchange for all_to_all: input j of rank i becomes output i of rank j."""
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

    def __init__(self, scheduler: Scheduler, calls: list[SimCall]) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._calls = calls

    def wait(self, timeout: object = None) -> bool:
        for call in self._calls:
            self._scheduler.wait(call.rank, call)
        return True

    def is_completed(self) -> bool:
        return all(self._scheduler.poll(call.rank, call) for call in self._calls)

    def result(self) -> Tensors:
        return [tensor for call in self._calls for tensor in call.outputs]

    def get_future(self) -> Any:
        future = SimFuture(self)
        # C++ waits for a future without giving the baton away, so it should be done.
        # It is not only if the others need this rank to go on first.
        future.done()
        return future

    def _source_rank(self) -> int:
        return self._calls[0].ranks.index(self._calls[0].source)


_Future: Any = torch.futures.Future  # its annotations do not allow a subclass like this


class SimFuture(_Future):
    """The result of a work, or what `then` makes of it; done when somebody asks."""

    def __init__(self, work: SimWork, origin: "SimFuture | None" = None) -> None:
        _Future.__init__(self)
        self._work = work
        self._origin = origin or self

    def done(self) -> bool:
        if self._work.is_completed():
            self._origin.fulfil()
        return _Future.done(self)

    def wait(self) -> Any:
        self._work.wait()
        self._origin.fulfil()
        return _Future.wait(self)

    def then(self, callback: Callable[[Any], object]) -> "SimFuture":
        following = SimFuture(self._work, self._origin)

        def go_on(_: object) -> None:
            try:
                following.set_result(callback(self))
            except Exception as error:
                following.set_exception(error)

        self.add_done_callback(go_on)
        return following

    def fulfil(self) -> None:
        if not _Future.done(self):
            self.set_result(self._work.result())


class Simulation:
    """What the ranks of one simulated world share: calls that are not complete."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.queues: dict[object, list[deque[SimCall]]] = {}
        self.letters: dict[object, list[SimCall]] = {}
        self.store: Any = None
        self.clear()

    def clear(self) -> None:
        self.queues.clear()
        self.letters.clear()
        self.store = cast(Any, dist).HashStore()

    def unmatched(self) -> list[SimCall]:
        queues = [queue for of_group in self.queues.values() for queue in of_group]
        return [c for calls in (*queues, *self.letters.values()) for c in calls]
