"""The `torch.distributed` backend "sim": collectives that meet in memory.

Each simulated rank is a thread of one `Scheduler`; a collective is complete when the
last rank of its group calls it, and that rank moves everybody's data. The calls are
compared first: ranks that disagree fail at once.

`SimGroup` is a Python subclass of `dist.ProcessGroup`, as torch 2.13 has no
constructor for a Python `Backend`. Torch's trampoline (PyProcessGroup.hpp) leads C++
callers, such as functional collectives and autograd, to these methods, and Python
callers (`dist.all_reduce`) find them on the group object itself. A C++ caller of a
method without trampoline gets an error from torch ("no backend"), never a hang.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from placements._torch import unseen, without_dispatch_modes
from placements.testing.ranks.calls import (
    SimCall,
    Simulation,
    SimWork,
    Tensors,
    alike,
    all_gather,
    by_rank,
    check_count,
    check_places,
    pieces,
    reduce_scatter,
    reduced,
    reduction,
    require,
    swap,
    unequal,
    write,
)
from placements.testing.ranks.failures import user_line


def _collective(build: Callable[..., SimCall]) -> Any:
    """Turn a method that describes a call into one that posts it."""

    @functools.wraps(build)
    def post(group: "SimGroup", *args: Any, **kwargs: Any) -> SimWork:
        # The caller's modes (types, counters) must not see the inside of a backend.
        with unseen(), torch.no_grad(), without_dispatch_modes():
            return group.post(build(group, *args, **kwargs))

    return post


def _of_one(method: Any) -> Any:
    """Return the form of a coalesced collective that takes one tensor."""

    @functools.wraps(method)
    def post(group: "SimGroup", output: Tensor, tensor: Tensor, opts: Any) -> SimWork:
        return method(group, [output], [tensor], opts)

    return post


# Torch's own annotations of these do not fit its own callers.
_ProcessGroup: Any = dist.ProcessGroup


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
        self._coalesced: list[SimCall] | None = None

    @property
    def group_name(self) -> str:
        return self._name

    def _get_backend(self, device: object = None) -> "SimGroup":
        """Return this group: since torch 2.15 `batch_isend_irecv` asks if it coalesces."""
        return self

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "sim"

    def post(self, call: SimCall) -> SimWork:
        """Enter `call` for this rank, and complete it if the others are there."""
        call.rank, call.ranks, call.line = self.global_rank, self.ranks, user_line()
        self.simulation.scheduler.announce(self.global_rank, call)
        call.check_density()
        key = (self._name, *self.ranks)
        if call.name in ("send", "recv"):
            self._meet_peer(call, self.simulation.letters.setdefault(key, []))
        else:
            empty = [deque[SimCall]() for _ in self.ranks]
            self._meet_group(call, self.simulation.queues.setdefault(key, empty))
        if self._coalesced is not None:
            self._coalesced.append(call)
        return SimWork(self.simulation.scheduler, [call])

    def _meet_group(self, call: SimCall, queues: list[deque[SimCall]]) -> None:
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

    def _meet_peer(self, call: SimCall, letters: list[SimCall]) -> None:
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

    def _fail(self, call: SimCall, headline: str) -> NoReturn:
        self.simulation.scheduler.fail(self.global_rank, call, headline)

    def _member(self, name: str, number: int) -> int:
        """Return the rank in the world of a rank in this group, such as a root."""
        known = 0 <= number < len(self.ranks)
        text = f"{name} got rank {number} of a group of {len(self.ranks)} ranks"
        require(known, f"{text}, {self.ranks}")
        return self.ranks[number]

    # From here on: the interface of ProcessGroup, with torch's names and arguments.
    @_collective
    def allreduce(self, tensors: Tensors, opts: Any) -> SimCall:
        op = opts.reduceOp

        def exchange(calls: list[SimCall]) -> None:
            for of_ranks in zip(*(call.inputs for call in calls), strict=True):
                total = reduced(op, of_ranks)
                for tensor in of_ranks:
                    write(tensor, total)

        agree = alike(tensors, in_place=True) | reduction(op, tensors)
        return SimCall("all_reduce", tensors, tensors, exchange, agree)

    @_collective
    def reduce(self, tensors: Tensors, opts: Any) -> SimCall:
        op, root = opts.reduceOp, int(opts.rootRank)

        def exchange(calls: list[SimCall]) -> None:
            total = reduced(op, [call.inputs[0] for call in calls])
            write(calls[root].outputs[0], total)

        agree = alike(tensors, in_place=True) | reduction(op, tensors)
        agree["root"] = self._member("reduce", root)
        return SimCall("reduce", tensors, tensors, exchange, agree)

    @_collective
    def broadcast(self, tensors: Tensors, opts: Any) -> SimCall:
        root = int(opts.rootRank)

        def exchange(calls: list[SimCall]) -> None:
            for call in calls:
                for place, value in zip(call.outputs, calls[root].inputs, strict=True):
                    write(place, value)

        agree = alike(tensors, in_place=True)
        agree["root"] = self._member("broadcast", root)
        return SimCall("broadcast", tensors, tensors, exchange, agree)

    @_collective
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> SimCall:
        check_count("all_gather", "output tensors", outputs[0], len(self.ranks))
        return all_gather("all_gather", [[t] for t in outputs[0]], inputs)

    @_collective
    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any
    ) -> SimCall:
        check_count("all_gather", "lists of output tensors", outputs, len(self.ranks))
        return all_gather("all_gather", outputs, inputs)

    @_collective
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> SimCall:
        of_ranks = by_rank("all_gather_single", outputs, len(self.ranks))
        return all_gather("all_gather_single", of_ranks, inputs)

    @_collective
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> SimCall:
        name, op = "reduce_scatter", opts.reduceOp
        check_count(name, "input tensors", inputs[0], len(self.ranks))
        return reduce_scatter(name, outputs, [[t] for t in inputs[0]], op, self._rank)

    @_collective
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> SimCall:
        name, op = "reduce_scatter_single", opts.reduceOp
        of_ranks = by_rank(name, inputs, len(self.ranks))
        call = reduce_scatter(name, outputs, of_ranks, op, self._rank)
        call.shown = inputs
        return call

    @_collective
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimCall:
        check_count("all_to_all", "input tensors", inputs, len(self.ranks))
        check_count("all_to_all", "output tensors", outputs, len(self.ranks))
        return SimCall("all_to_all", inputs, outputs, swap)

    @_collective
    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> SimCall:
        name = "all_to_all_single"
        sent = pieces(name, tensor, len(self.ranks), input_splits)
        places = pieces(name, output, len(self.ranks), output_splits)
        own: dict[str, object] = {
            "input_splits": [piece.shape[0] for piece in sent],
            "output_splits": [piece.shape[0] for piece in places],
        }
        return SimCall(name, sent, places, swap, own=own, shown=[tensor])

    @_collective
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> SimCall:
        root = int(opts.rootRank)

        def exchange(calls: list[SimCall]) -> None:
            for call, place in zip(calls, calls[root].outputs, strict=True):
                write(place, call.inputs[0])

        agree = alike(inputs) | {"root": self._member("gather", root)}
        places = outputs[0] if outputs else []
        if self._rank == root:
            check_count("gather", "output tensors", places, len(self.ranks))
        for place in places:
            check_places("gather", [place], inputs)
        return SimCall("gather", inputs, places, exchange, agree)

    def gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> SimWork:
        """Gather the pieces into one tensor on the root (since torch 2.15)."""
        is_root = self._rank == int(opts.rootRank)
        outputs = by_rank("gather_single", [output], len(self.ranks)) if is_root else []
        return self.gather([[place for (place,) in outputs]], [tensor], opts)

    @_collective
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> SimCall:
        root = int(opts.rootRank)

        def exchange(calls: list[SimCall]) -> None:
            for call, value in zip(calls, calls[root].inputs, strict=True):
                write(call.outputs[0], value)

        agree = alike(outputs, in_place=True) | {"root": self._member("scatter", root)}
        values = inputs[0] if inputs else []
        if self._rank == root:
            check_count("scatter", "input tensors", values, len(self.ranks))
        for value in values:
            require(value.is_contiguous(), "scatter needs contiguous tensors")
            check_places("scatter", outputs, [value])
        return SimCall("scatter", values, outputs, exchange, agree, shown=outputs)

    @_collective
    def barrier(self, opts: Any = None) -> SimCall:
        return SimCall("barrier", [], [])

    def monitored_barrier(self, *_: object, **__: object) -> None:
        self.barrier().wait()

    @_collective
    def send(self, tensors: Tensors, destination: int, tag: int) -> SimCall:
        to = self._member("send", destination)
        return SimCall("send", tensors, [], own={"to": to, "tag": tag})

    @_collective
    def recv(self, tensors: Tensors, source: int, tag: int) -> SimCall:
        sender = self._member("recv", source)
        return SimCall("recv", [], tensors, own={"from": sender, "tag": tag})

    @_collective
    def recv_anysource(self, tensors: Tensors, tag: int) -> SimCall:
        return SimCall("recv", [], tensors, own={"from": "any", "tag": tag})

    def _start_coalescing(self, device: object = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: object = None) -> SimWork:
        calls, self._coalesced = self._coalesced or [], None
        return SimWork(self.simulation.scheduler, calls)

    all_gather_single = _of_one(all_gather_single_coalesced)
    reduce_scatter_single = _of_one(reduce_scatter_single_coalesced)
    allreduce_coalesced = allreduce
    gather_into_tensor = gather_single
    # The names these had before torch 2.13, still called by Python and C++.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
