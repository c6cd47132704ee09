"""`python -m benchmarks.overlap_trace`: what runs while rows travel, on 2 gloo processes.

Times are taken around the real calls of one step of the layer. An exchange is under way
from where it starts until the wait for it returns. Printed for each is how long the wait
held the program up, in this step and in one that waits where each exchange starts; and for
what the layer computes, how much of it ran while an exchange was under way.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from placements import Pending, all_to_all, set_current_mesh
from placements.collectives import transport
from placements.testing import device_mesh, run_ranks
from spmd_moe import MoE, MoEConfig, Parallel, dispatch_all_to_all

CONFIG = MoEConfig(dim=512, hidden_dim=256, num_experts=8, top_k=2, num_shared_experts=2)
TOKENS, ROUNDS = 1024, 9


class Span(NamedTuple):
    """What ran, and from when to when; `held` is how long the program waited for it."""

    what: str
    start: float
    end: float
    held: float | None = None

    def meets(self, other: "Span") -> float:
        """Return for how long both ran."""
        return max(0.0, min(self.end, other.end) - max(self.start, other.start))


class Arrived(Pending):
    """Rows that were waited for where their exchange started."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def wait(self) -> Tensor:
        return self._rows


def at_once(*args: Any, **kwargs: Any) -> Pending:
    return Arrived(all_to_all(*args, **kwargs))


class Clock:
    """The spans of one step."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._begun: list[tuple[str, float]] = []
        self._under_way: dict[int, float] = {}
        self._start, self._arrived = transport.start_exchange, transport.arrived

    def begin(self, what: str) -> None:
        self._begun.append((what, time.perf_counter()))

    def end(self, *_: Any) -> None:
        self.spans.append(Span(*self._begun.pop(), time.perf_counter()))

    def start_exchange(self, *args: Any) -> Tensor:
        start = time.perf_counter()
        received = self._start(*args)
        self._under_way[received.data_ptr()] = start
        return received

    def arrived(self, ranks: Any, received: Tensor) -> Tensor:
        waits = time.perf_counter()
        result = self._arrived(ranks, received)
        end = time.perf_counter()
        start = self._under_way.pop(received.data_ptr())
        name = f"exchange of {received.numel() * received.element_size()} bytes"
        self.spans.append(Span(name, start, end, end - waits))
        return result


@contextmanager
def layer() -> Iterator[tuple[Callable[[], None], Clock]]:
    """Yield a step of the layer on this rank, forward and backward, and its clock."""
    torch.set_num_threads(1)
    parallel, clock = Parallel(dp=2, ep=2), Clock()
    sparse = device_mesh(parallel.sparse_mesh())
    fill_slots = dispatch_all_to_all.fill_slots

    def copy(*args: Any, **kwargs: Any) -> Tensor:
        clock.begin("copy tokens")
        rows_ND = fill_slots(*args, **kwargs)
        clock.end()
        return rows_ND

    with (
        set_current_mesh(device_mesh(parallel.dense_mesh())),
        mock.patch.object(dispatch_all_to_all, "fill_slots", copy),
        mock.patch.object(transport, "start_exchange", clock.start_exchange),
        mock.patch.object(transport, "arrived", clock.arrived),
    ):
        moe = MoE(CONFIG, parallel, sparse_mesh=sparse)
        shared = moe.shared_experts
        assert shared is not None
        shared.register_forward_pre_hook(lambda *_: clock.begin("shared experts"))
        shared.register_forward_hook(clock.end)
        shared.register_full_backward_pre_hook(lambda *_: clock.begin("shared, backward"))
        shared.register_full_backward_hook(clock.end)
        generator = torch.Generator().manual_seed(dist.get_rank())
        x_TD = torch.randn(TOKENS, CONFIG.dim, generator=generator).requires_grad_()

        def step() -> None:
            moe(x_TD, seq_len=TOKENS).sum().backward()

        yield step, clock


def measured() -> tuple[list[Span], list[Span], list[tuple[float, float]]]:
    """Return the spans of a step with overlap and of one without, and times of both."""
    spans: list[list[Span]] = []
    times: list[tuple[float, float]] = []
    plainly = mock.patch.object(dispatch_all_to_all, "all_to_all_start", at_once)
    with layer() as (step, clock):
        for _ in range(ROUNDS + 1):
            spans.clear()
            pair: list[float] = []
            for apart in (True, False):
                clock.spans = []
                dist.barrier()
                start = time.perf_counter()
                if apart:
                    step()
                else:
                    with plainly:
                        step()
                pair.append((time.perf_counter() - start) * 1000)
                spans.append(_from(start, clock.spans))
            times.append((pair[0], pair[1]))
    return spans[0], spans[1], times[1:]


def _from(zero: float, spans: list[Span]) -> list[Span]:
    """Return the spans in ms since `zero`, by their starts."""
    found = [
        Span(s.what, (s.start - zero) * 1000, (s.end - zero) * 1000,
             None if s.held is None else s.held * 1000)
        for s in spans
    ]  # fmt: skip
    return sorted(found, key=lambda span: span.start)


def main() -> None:
    ranks = run_ranks(2, measured, backend="gloo", timeout=300.0)
    for title, which in (("started and waited for apart", 0), ("waited for at once", 1)):
        print(f"rank 0, {title}\n{'':28}   start      end  waits  beside an exchange")
        spans: list[Span] = ranks[0][which]
        exchanges = [span for span in spans if span.held is not None]
        for span in spans:
            beside = sum(span.meets(other) for other in exchanges)
            said = f"{'':6} {beside:19.1f}" if span.held is None else f"{span.held:6.1f}"
            print(f"{span.what:28}{span.start:8.1f} {span.end:8.1f} {said}")
    times = ranks[0][2]
    apart, plain = (statistics.median(side) for side in zip(*times, strict=True))
    ratios = sorted(a / b for a, b in times)
    print(
        f"a step, median of {len(times)}: {apart:.1f} ms, waiting at once {plain:.1f} ms; "
        f"ratio {statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}"
    )


if __name__ == "__main__":
    main()
