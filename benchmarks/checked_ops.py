"""`typecheck()` per op on router-like code, with `spmd_types` as peer in this process.

linear, sigmoid, topk, gather, scatter, sum: at most 10 us per op over the unchecked op,
at most 1/8 of what `spmd_types` takes in local mode and 1/60 of its global mode.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import linear
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.timing import Candidate, Result, medians
from placements import R, S, assert_type, set_current_mesh, typecheck

B, L, D, E, K = 4, 16, 32, 16, 4
NUM_OPS = 7  # of `router`
LIMIT_US, PARTS_OF_LOCAL, PARTS_OF_GLOBAL = 10, 8, 60


def router(x_BLD: Tensor, w_ED: Tensor) -> tuple[Tensor, Tensor]:
    scores_BLE = torch.sigmoid(linear(x_BLD, w_ED))
    _, ids_BLK = torch.topk(scores_BLE, K, dim=-1)
    gates_BLK = torch.gather(scores_BLE, -1, ids_BLK)
    map_BLE = torch.scatter(torch.zeros_like(scores_BLE), -1, ids_BLK, 1.0)
    return gates_BLK, torch.sum(map_BLE, dim=(0, 1))


def measure() -> list[Result]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    times = medians(
        {
            "plain": _plain(),
            "ours": _ours(mesh),
            "local": _peer(mesh, local=True),
            "global": _peer(mesh, local=False),
        },
        calls=20,
        rounds=21,
    )
    dist.destroy_process_group()
    cost = {name: (times[name] - times["plain"]) / NUM_OPS * 1e6 for name in times}
    what = "typecheck() per op, over the unchecked op"
    ok = cost["ours"] <= LIMIT_US
    results = [Result(what, f"{cost['ours']:.1f} us", f"<= {LIMIT_US} us", ok)]
    for name, parts in (("local", PARTS_OF_LOCAL), ("global", PARTS_OF_GLOBAL)):
        times_less = cost[name] / cost["ours"]
        shown = f"1/{times_less:.1f} of {cost[name]:.0f} us"
        what = f"the same, as a part of spmd_types {name} mode"
        results.append(Result(what, shown, f"<= 1/{parts}", times_less >= parts))
    return results


def _plain() -> Candidate:
    x, w = torch.randn(B, L, D), torch.randn(E, D)
    return Candidate(lambda: router(x, w))


def _ours(mesh: DeviceMesh) -> Candidate:
    x, w = torch.randn(B, L, D), torch.randn(E, D)

    @contextmanager
    def context() -> Generator[None]:
        with set_current_mesh(mesh), typecheck():
            assert_type(x, {"dp": S(0), "tp": S(1)})
            assert_type(w, {"dp": R, "tp": R})
            yield

    return Candidate(lambda: router(x, w), context)


def _peer(mesh: DeviceMesh, *, local: bool) -> Candidate:
    import spmd_types as peer
    from spmd_types.checker import typecheck as peer_typecheck

    x, w = torch.randn(B, L, D), torch.randn(E, D)
    tokens: dict[str, Any] = {"dp": peer.S(0), "tp": peer.S(1)}
    if local:
        tokens = {"dp": peer.V, "tp": peer.V}

    @contextmanager
    def context() -> Generator[None]:
        with peer.set_current_mesh(mesh), peer_typecheck(local=local):
            peer.assert_type(x, tokens)
            peer.assert_type(w, {"dp": peer.R, "tp": peer.R})
            yield

    return Candidate(lambda: router(x, w), context)
