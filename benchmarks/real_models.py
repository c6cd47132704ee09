"""`typecheck()` per torch function on models of `transformers`, beside `spmd_types`.

Forward of tiny models with plain data parallelism. What is added to the unchecked model is
at most a sixth of what the peer adds in local mode, in this process. An empty block costs
at most as much as ten checked functions.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.models import AXES, LENGTH, Model, bert, functions_of, llama, qwen3_moe
from benchmarks.timing import Candidate, Result, medians
from placements import set_current_mesh, typecheck
from placements.interop.fake_world import fake_world

PARTS_OF_LOCAL, MOST_FUNCTIONS = 6, 10


def measure() -> list[Result]:
    results: list[Result] = []
    per_function: list[float] = []
    with fake_world():
        mesh = init_device_mesh("cpu", tuple(AXES.values()), mesh_dim_names=tuple(AXES))
        for model in (llama(), qwen3_moe(), bert()):
            ours, local = _costs(model, mesh)
            per_function.append(ours)
            shown = f"{ours:.1f} us, 1/{local / ours:.1f} of {local:.0f} us"
            what = f"typecheck() per torch function of {model.name}, and of spmd_types"
            ok = local / ours >= PARTS_OF_LOCAL
            results.append(Result(what, shown, f"<= 1/{PARTS_OF_LOCAL}", ok))
    block = _empty_block()
    functions = block / min(per_function)
    shown = f"{functions:.1f} ({block:.0f} us)"
    what = "an empty typecheck() block, in checked torch functions"
    ok = functions <= MOST_FUNCTIONS
    return [*results, Result(what, shown, f"<= {MOST_FUNCTIONS}", ok)]


def _costs(model: Model, mesh: DeviceMesh) -> tuple[float, float]:
    """What checking adds per torch function, ours and the peer's, in microseconds."""
    candidates = {
        "plain": _plain(model), "ours": _ours(model, mesh), "local": _peer(model, mesh),
    }  # fmt: skip
    times = medians(candidates, calls=5, rounds=21)
    count = functions_of(model)
    ours, local = (
        (times[name] - times["plain"]) / count * 1e6 for name in ("ours", "local")
    )
    return ours, local


def _plain(model: Model) -> Candidate:
    arguments = model.arguments(LENGTH)
    return Candidate(lambda: model.module(*arguments))


def _ours(model: Model, mesh: DeviceMesh) -> Candidate:
    arguments: list[torch.Tensor] = []

    @contextmanager
    def context() -> Generator[None]:
        with set_current_mesh(mesh), typecheck():
            arguments[:] = model.declared(LENGTH)
            yield

    return Candidate(lambda: model.module(*arguments), context)


def _peer(model: Model, mesh: DeviceMesh) -> Candidate:
    import spmd_types as peer
    from spmd_types.checker import typecheck as peer_typecheck

    arguments = model.arguments(LENGTH)

    @contextmanager
    def context() -> Generator[None]:
        with peer.set_current_mesh(mesh), peer_typecheck(local=True):
            for x in (*model.module.parameters(), *model.module.buffers()):
                peer.assert_type(x, {"dp": peer.R})
            for x in arguments:
                peer.assert_type(x, {"dp": peer.V if x.shape[0] > 1 else peer.R})
            yield

    return Candidate(lambda: model.module(*arguments), context)


def _empty_block() -> float:
    def enter_and_leave() -> None:
        with typecheck():
            pass

    context = lambda: set_current_mesh(AXES)  # noqa: E731 - a context for each round
    times = medians({"block": Candidate(enter_and_leave, context)}, calls=50)
    return times["block"] * 1e6
