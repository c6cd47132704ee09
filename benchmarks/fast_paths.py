"""Each fast path against the plain path, on 2 and 4 gloo ranks.

Dispatch and collect alone, forward and backward, no experts between them: so what differs
is the path. The two take turns, and told is the median of the ratios of neighbouring
calls, with its upper 95 % bound, and the bytes that a rank hands to ep in a forward. Below
1 the fast path is faster. The last rows are on one rank: what combine can be asked to do.
`make bench-layer` shows the same.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.layer.paired import Times, ratio
from placements import ledger, set_current_mesh
from placements.testing import device_mesh, run_ranks
from placements.types.mesh import as_mesh
from spmd_moe import AllToAllDispatcher, MoEConfig, Router
from spmd_moe.combine import combine, combine_into
from spmd_moe.dispatch import LocalDispatcher, sort_by_expert
from spmd_moe.layouts import layout
from spmd_moe.paths.agreement import ByExchange, ByGather, ByTurns
from spmd_moe.paths.regroup import ByIndex, PadGroups, regrouped
from spmd_moe.permute import inverse, regroup

ROUNDS = 25


@dataclass(frozen=True)
class Path:
    """A fast path, and the plain one it is compared with, as settings of a dispatcher."""

    name: str
    round_robin: bool
    plain: dict[str, Any]
    fast: dict[str, Any]
    top_k: int = 2
    drop_own: bool = False  # the plain path counts again, and sorts


def by_index(agreed: Any, num_rows: int) -> ByIndex:
    """Regroup as if the host knew nothing."""
    order_M = regroup(agreed.received_WG, num_rows)
    return ByIndex(agreed.received_WG.sum(0), None, order_M, inverse(order_M))


TOLD: dict[str, Any] = {"agreement": ByExchange(), "regrouper": regrouped}
KNOWN = {**TOLD, "agreement": ByTurns(ByExchange())}
PATHS = (
    Path("regroup by parts", False, {**TOLD, "regrouper": by_index}, TOLD),
    Path("counts made once", False, TOLD, TOLD, drop_own=True),
    Path("forced equal splits", False, TOLD, {**TOLD, "agreement": ByGather(math.inf)}),
    Path("adaptive equal splits", False, TOLD, {**TOLD, "agreement": ByGather(0.1)}),
    Path("padded groups (16)", False, TOLD, {**TOLD, "regrouper": PadGroups(16)}),
    Path("equal-count view", True, {**KNOWN, "regrouper": by_index}, KNOWN, top_k=3),
    Path("round robin known, order kept", True, TOLD, KNOWN, top_k=3, drop_own=True),
    Path("round robin padded", True, KNOWN,
         {**KNOWN, "agreement": ByTurns(ByExchange(), math.inf)}, top_k=3),
    Path("direct send", True, TOLD, KNOWN, top_k=4, drop_own=True),
)  # fmt: skip


def step(dispatcher: Any, routing: Any, x_TD: Tensor) -> None:
    x_TD = x_TD.detach().requires_grad_()
    sent = dispatcher.dispatch(x_TD, routing)
    rows_ND = dispatcher.collect(sent.rows_MD, sent.plan)
    rows_ND.sum().backward()


Compared = tuple[list[float], list[float], list[int]]


def compare(path: Path, ranks: int, tokens: int, dim: int) -> Compared:
    """Seconds of each call, plain and fast, and bytes over ep of one forward of each."""
    torch.set_num_threads(1)
    at, mesh = layout("C1"), device_mesh({"dp": 1, "cp": 1, "tp": ranks})
    sparse = as_mesh(device_mesh({"edp": 1, "ep": ranks, "etp": 1}))
    config = MoEConfig(
        dim=dim, hidden_dim=8, num_experts=4 * ranks, top_k=path.top_k,
        round_robin=path.round_robin,
    )  # fmt: skip
    with set_current_mesh(mesh):
        router = Router(config, at, as_mesh(mesh))
        x_TD = torch.randn(tokens, dim)
        with torch.no_grad():
            routing = router(x_TD)
        slow = replace(routing, own=None) if path.drop_own else routing
        calls: list[Callable[[], None]] = []
        for settings, chosen in ((path.plain, slow), (path.fast, routing)):
            dispatcher = AllToAllDispatcher(at, sparse, False, **settings)
            calls.append(lambda d=dispatcher, r=chosen: step(d, r, x_TD))
        sizes: list[int] = []
        for call in calls:
            with ledger() as record:
                call()
            sizes.append(sum(e.nbytes for e in record.entries if not e.backward))
        times: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for call, found in zip(calls, times, strict=True):
                start = time.perf_counter()
                call()
                found.append(time.perf_counter() - start)
    return times[0], times[1], sizes


def on_one_rank() -> list[tuple[str, list[float], list[float]]]:
    """Gates in bfloat16, and rows added into the output of the shared experts."""
    torch.set_num_threads(1)
    at = layout("C4")
    tokens, dim, choices, experts = 2048, 512, 4, 16
    x_TD = torch.randn(tokens, dim).bfloat16()
    config = MoEConfig(dim=dim, hidden_dim=8, num_experts=experts, top_k=choices)
    found: list[tuple[str, list[float], list[float]]] = []
    with torch.no_grad(), set_current_mesh({}):
        routing = Router(config, at, as_mesh({}))(x_TD)
        slots = sort_by_expert(routing)
        sent = LocalDispatcher(at).dispatch(x_TD, routing)
        rows_ND = sent.rows_MD
        cases = (
            ("gates in bfloat16", rows_ND, True),
            ("rows added in place", rows_ND.float(), False),
        )
        for name, rows, narrow in cases:
            shared_TD = torch.randn(tokens, dim, dtype=rows.dtype)

            def plain(rows: Tensor = rows, shared_TD: Tensor = shared_TD) -> Tensor:
                back = rows.index_select(0, slots.inverse_N)
                return combine(back, routing.gates_TK, at, weigh=True) + shared_TD

            def quick(
                rows: Tensor = rows, shared_TD: Tensor = shared_TD, narrow: bool = narrow
            ) -> Tensor:
                if narrow:
                    back = rows.index_select(0, slots.inverse_N)
                    y_TD = combine(back, routing.gates_TK, at, weigh=True, narrow=True)
                    return y_TD + shared_TD
                return combine_into(shared_TD, rows, routing.gates_TK, slots.order_N, at,
                                    weigh=True, keep=x_TD)  # fmt: skip

            times: list[list[float]] = [[], []]
            for _ in range(ROUNDS):
                for call, kept in zip((plain, quick), times, strict=True):
                    start = time.perf_counter()
                    call()
                    kept.append(time.perf_counter() - start)
            found.append((name, times[0], times[1]))
    return found


SHAPES = ((64, 64), (1024, 256))


def every_path(ranks: int, shape: tuple[int, int]) -> list[Compared]:
    return [compare(path, ranks, *shape) for path in PATHS]


def measure(
    shapes: tuple[tuple[int, int], ...], tell: Callable[[str], object]
) -> Iterator[dict[str, Any]]:
    """One record for each path, number of ranks and shape."""
    for ranks in (2, 4):
        for shape in shapes:
            tell(f"fast paths, {ranks} ranks, {shape[0]} tokens of {shape[1]}")
            mesh = {"dp": 1, "cp": 1, "tp": ranks}
            found = run_ranks(
                mesh, every_path, ranks, shape, backend="gloo", timeout=600.0
            )[0]
            for path, (slow, quick, sizes) in zip(PATHS, found, strict=True):
                yield record(path.name, ranks, shape, slow, quick, sizes)
    tell("fast paths, one rank")
    for name, slow, quick in on_one_rank():
        yield record(name, 1, (2048, 512), slow, quick, [0, 0])


def record(
    name: str,
    ranks: int,
    shape: tuple[int, int],
    slow: list[float],
    quick: list[float],
    sizes: list[int],
) -> dict[str, Any]:
    plain, fast = Times(slow), Times(quick)
    return {
        "path": name, "ranks": ranks, "tokens": shape[0], "dim": shape[1],
        "seconds": {"plain": plain.median, "fast": fast.median},
        "ratio": asdict(ratio(fast, plain)), "bytes": sizes,
    }  # fmt: skip


def main() -> None:
    from benchmarks.layer.report import markdown

    print(markdown({"paths": list(measure(SHAPES, lambda _: None))}))


if __name__ == "__main__":
    main()
