"""The `torch.distributed` backend "sim": collectives that meet in memory.

Each simulated rank is a thread of one `Lockstep`; a collective is complete when the
last rank of its group calls it, and that rank moves everybody's data. The calls are
compared first, so that ranks that disagree fail at once. What gloo accepts and then
silently gets wrong (a tensor with gaps, or laid out in another order than its peers)
is refused too.

`SimGroup` is a Python subclass of `dist.ProcessGroup`, as torch 2.13 has no
constructor for a Python `Backend`. Torch's trampoline (PyProcessGroup.hpp) leads C++
callers, such as functional collectives and autograd, to these methods, and Python
callers (`dist.all_reduce`) find them on the group object itself. A C++ caller of a
method without trampoline gets an error from torch ("no backend"), never a hang.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _python_dispatch

from placements.testing.lockstep import Line, Lockstep, shown_line, user_line

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


def _collective(build: Callable[..., Call]) -> Any:
    """Turn a method that describes a call into one that posts it."""

    @functools.wraps(build)
    def post(group: "SimGroup", *args: Any, **kwargs: Any) -> SimWork:
        # The caller's modes (types, counters) must not see the inside of a backend.
        modes = _torch_c._len_torch_dispatch_stack() > 0
        hidden = _modes._disable_current_modes() if modes else nullcontext()
        with _torch_c.DisableTorchFunction(), torch.no_grad(), hidden:
            return group.post(build(group, *args, **kwargs))

    return post


def _of_one(method: Any) -> Any:
    """The form of a coalesced collective that takes one tensor."""

    @functools.wraps(method)
    def post(group: "SimGroup", output: Tensor, tensor: Tensor, opts: Any) -> SimWork:
        return method(group, [output], [tensor], opts)

    return post


# Torch's own annotations of these do not fit its own callers.
_ProcessGroup: Any = dist.ProcessGroup
_torch_c: Any = cast(Any, torch)._C
_modes: Any = _python_dispatch


class SimGroup(_ProcessGroup):
    """The view that one rank has of one simulated process group."""

    def __init__(
        self, simulation: Simulation, rank: int, ranks: Sequence[int], name: str
    ) -> None:
        _ProcessGroup.__init__(self, rank, len(ranks))
        self.simulation = simulation
        self.ranks = list(ranks)
        self.global_rank = ranks[rank]
        self._rank = rank
        self._name = name
        self._coalesced: list[Call] | None = None

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "sim"

    def post(self, call: Call) -> SimWork:
        """Enter `call` for this rank, and complete it if the others are there."""
        call.rank, call.ranks, call.line = self.global_rank, self.ranks, user_line()
        self.simulation.lockstep.announce(self.global_rank, call)
        call.check_density()
        key = (self._name, *self.ranks)
        if call.name in ("send", "recv"):
            self._meet_peer(call, self.simulation.letters.setdefault(key, []))
        else:
            empty = [deque[Call]() for _ in self.ranks]
            self._meet_group(call, self.simulation.queues.setdefault(key, empty))
        if self._coalesced is not None:
            self._coalesced.append(call)
        return SimWork(self.simulation.lockstep, [call])

    def _meet_group(self, call: Call, queues: list[deque[Call]]) -> None:
        place = len(queues[self._rank])
        queues[self._rank].append(call)
        for queue in queues:
            if len(queue) > place and (why := queue[place].difference(call)):
                self._fail(call, why)
        if all(queues):
            calls = [queue.popleft() for queue in queues]
            if complaint := call.exchange(calls):
                self._fail(call, complaint)
            for member in calls:
                member.done = True

    def _meet_peer(self, call: Call, letters: list[Call]) -> None:
        for other in letters:
            send, recv = (call, other) if call.name == "send" else (other, call)
            if send.name == recv.name or send.own["tag"] != recv.own["tag"]:
                continue
            if send.own["to"] != recv.rank:
                continue
            if recv.own["from"] not in (send.rank, "any"):
                continue
            if complaint := unequal(send, send.inputs[0], recv, recv.outputs[0]):
                self._fail(call, complaint)
            letters.remove(other)
            write(recv.outputs[0], send.inputs[0])
            recv.source = send.rank
            send.done = recv.done = True
            return
        letters.append(call)

    def _fail(self, call: Call, headline: str) -> NoReturn:
        self.simulation.lockstep.fail(self.global_rank, call, headline)

    # From here on: the interface of ProcessGroup, with torch's names and arguments.

    @_collective
    def allreduce(self, tensors: Tensors, opts: Any) -> Call:
        op = opts.reduceOp

        def exchange(calls: list[Call]) -> None:
            for of_ranks in zip(*(call.inputs for call in calls), strict=True):
                total = reduced(op, of_ranks)
                for tensor in of_ranks:
                    write(tensor, total)

        agree = alike(tensors, in_place=True) | reduction(op, tensors)
        return Call("all_reduce", tensors, tensors, exchange, agree)

    @_collective
    def reduce(self, tensors: Tensors, opts: Any) -> Call:
        op, root = opts.reduceOp, int(opts.rootRank)

        def exchange(calls: list[Call]) -> None:
            total = reduced(op, [call.inputs[0] for call in calls])
            write(calls[root].outputs[0], total)

        agree = alike(tensors, in_place=True) | reduction(op, tensors)
        agree["root"] = self.ranks[root]
        return Call("reduce", tensors, tensors, exchange, agree)

    @_collective
    def broadcast(self, tensors: Tensors, opts: Any) -> Call:
        root = int(opts.rootRank)

        def exchange(calls: list[Call]) -> None:
            for call in calls:
                for place, value in zip(call.outputs, calls[root].inputs, strict=True):
                    write(place, value)

        agree = alike(tensors, in_place=True) | {"root": self.ranks[root]}
        return Call("broadcast", tensors, tensors, exchange, agree)

    @_collective
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Call:
        return all_gather("all_gather", [[t] for t in outputs[0]], inputs)

    @_collective
    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any
    ) -> Call:
        return all_gather("all_gather", outputs, inputs)

    @_collective
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> Call:
        of_ranks = by_rank(outputs, len(self.ranks))
        return all_gather("all_gather_single", of_ranks, inputs)

    @_collective
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Call:
        of_ranks = [[tensor] for tensor in inputs[0]]
        return reduce_scatter("reduce_scatter", outputs, of_ranks, opts.reduceOp)

    @_collective
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> Call:
        of_ranks = by_rank(inputs, len(self.ranks))
        call = reduce_scatter("reduce_scatter_single", outputs, of_ranks, opts.reduceOp)
        call.shown = inputs
        return call

    @_collective
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Call:
        return Call("all_to_all", inputs, outputs, swap)

    @_collective
    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Call:
        sent = pieces(tensor, len(self.ranks), input_splits)
        places = pieces(output, len(self.ranks), output_splits)
        own: dict[str, object] = {
            "input_splits": [piece.shape[0] for piece in sent],
            "output_splits": [piece.shape[0] for piece in places],
        }
        return Call("all_to_all_single", sent, places, swap, own=own, shown=[tensor])

    @_collective
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Call:
        root = int(opts.rootRank)

        def exchange(calls: list[Call]) -> None:
            for call, place in zip(calls, calls[root].outputs, strict=True):
                write(place, call.inputs[0])

        places = outputs[0] if outputs else []
        for place in places:
            check_places([place], inputs)
        agree = alike(inputs) | {"root": self.ranks[root]}
        return Call("gather", inputs, places, exchange, agree)

    @_collective
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Call:
        root = int(opts.rootRank)

        def exchange(calls: list[Call]) -> None:
            for call, value in zip(calls, calls[root].inputs, strict=True):
                write(call.outputs[0], value)

        values = inputs[0] if inputs else []
        for value in values:
            require(value.is_contiguous(), "scatter needs contiguous tensors")
            check_places(outputs, [value])
        agree = alike(outputs, in_place=True) | {"root": self.ranks[root]}
        return Call("scatter", values, outputs, exchange, agree, shown=outputs)

    @_collective
    def barrier(self, opts: Any = None) -> Call:
        return Call("barrier", [], [])

    def monitored_barrier(
        self, timeout: object = None, wait_all_ranks: bool = False
    ) -> None:
        self.barrier().wait()

    @_collective
    def send(self, tensors: Tensors, destination: int, tag: int) -> Call:
        to = self.ranks[destination]
        return Call("send", tensors, [], own={"to": to, "tag": tag})

    @_collective
    def recv(self, tensors: Tensors, source: int, tag: int) -> Call:
        return Call("recv", [], tensors, own={"from": self.ranks[source], "tag": tag})

    @_collective
    def recv_anysource(self, tensors: Tensors, tag: int) -> Call:
        return Call("recv", [], tensors, own={"from": "any", "tag": tag})

    def _start_coalescing(self, device: object = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: object = None) -> SimWork:
        calls, self._coalesced = self._coalesced or [], None
        return SimWork(self.simulation.lockstep, calls)

    all_gather_single = _of_one(all_gather_single_coalesced)
    reduce_scatter_single = _of_one(reduce_scatter_single_coalesced)
    allreduce_coalesced = allreduce
    # The names these had before torch 2.13, still called by Python and C++.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
