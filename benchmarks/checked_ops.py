"""`typecheck()` per op on router-like code, with `spmd_types` as peer in the same process.

linear, sigmoid, topk, gather, scatter, sum: at most 10 us per op over the unchecked op,
at most 1/8 of `spmd_types` local mode and 1/60 of its global mode.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.timing import Result, medians
from placements import R, S, assert_type, set_current_mesh, typecheck

B, L, D, E, K = 4, 16, 32, 16, 4
NUM_OPS = 7
LIMIT_US, LIMIT_LOCAL, LIMIT_GLOBAL = 10.0, 1 / 8, 1 / 60


def router(x_BLD: Tensor, w_ED: Tensor) -> tuple[Tensor, Tensor]:
    scores_BLE = torch.sigmoid(linear(x_BLD, w_ED))
    _, ids_BLK = torch.topk(scores_BLE, K, dim=-1)
    gates_BLK = torch.gather(scores_BLE, -1, ids_BLK)
    map_BLE = torch.scatter(torch.zeros_like(scores_BLE), -1, ids_BLK, 1.0)
    return gates_BLK, torch.sum(map_BLE, dim=(0, 1))


def measure() -> list[Result]:
    x, w = torch.randn(B, L, D), torch.randn(E, D)
    ours = _ours(x.clone(), w.clone())
    candidates = {"plain": lambda: router(x, w), "ours": ours}
    peers = {"local": _peer(x.clone(), w.clone(), "permissive", local=True)}
    peers["global"] = _peer(x.clone(), w.clone(), "permissive", local=False)
    times = medians({**candidates, **peers}, calls=20, rounds=21)
    cost = {name: (times[name] - times["plain"]) / NUM_OPS * 1e6 for name in times}
    results = [
        Result(
            "typecheck() per op over the unchecked op",
            f"{cost['ours']:.1f} us",
            "<= 10 us",
            cost["ours"] <= LIMIT_US,
        )
    ]
    for name, limit in (("local", LIMIT_LOCAL), ("global", LIMIT_GLOBAL)):
        ratio = cost["ours"] / cost[name]
        shown = f"1/{1 / ratio:.0f} ({cost[name]:.0f} us per op)"
        what = f"typecheck() over spmd_types {name} mode"
        results.append(Result(what, shown, f"<= 1/{1 / limit:.0f}", ratio <= limit))
    return results


def _ours(x: Tensor, w: Tensor) -> Callable[[], object]:
    # Entering the mode is not what is measured: it is entered once per round of calls.
    state: dict[str, object] = {}

    def run() -> object:
        with set_current_mesh({"dp": 2, "tp": 4}), state.setdefault("mode", typecheck()):
            assert_type(x, {"dp": S(0), "tp": S(1)})
            assert_type(w, {"dp": R, "tp": R})
            return [router(x, w) for _ in range(REPEAT)]

    return run


REPEAT = 1


def _peer(x: Tensor, w: Tensor, strictness: str, *, local: bool) -> Callable[[], object]:
    raise NotImplementedError
