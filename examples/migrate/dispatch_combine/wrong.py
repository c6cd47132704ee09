"""The rows are sent by a function with a backward, and their gates by the plain collective:
the forward is exact, and the router gets no gradient from the loss (B50: NeMo Automodel
#2995, there with an all-gather). `typecheck()` and `verify()` refuse raw collectives: those
of `placements` all have a backward. `spmd_types` gives raw collectives a type, and leaves
gradients aside."""

import spmd_types as spmd
from torch import Tensor

from examples.migrate.dispatch_combine import after_placements as ours
from examples.migrate.dispatch_combine import after_spmd_types as peer
from examples.migrate.dispatch_combine import before as raw
from examples.migrate.dispatch_combine.one_device import SPARSE
from placements import S, V, current_mesh, reinterpret, reinterpret_mesh, set_current_mesh
from placements.testing import device_mesh


def before(x: Tensor, gates: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    sent, received = raw.splits(ids)
    order = ids.argsort(stable=True)
    rows = raw.AllToAll.apply(x[order], sent, received)
    weights = raw.send(gates[order], sent, received)
    computed = (rows @ w[0]) * weights.unsqueeze(1)
    return raw.AllToAll.apply(computed, received, sent)[order.argsort()]


def after_placements(x: Tensor, gates: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    dense, sparse = current_mesh(), device_mesh(SPARSE)
    assert dense is not None
    x, gates, ids, w = (
        reinterpret_mesh(ours.own(held), sparse) for held in (x, gates, ids, w)
    )
    with set_current_mesh(sparse):
        sent, received = ours.splits(ids)
        order = ids.argsort(stable=True)
        rows = ours.send(x[order], sent, received)
        weights = raw.send(gates[order], sent, received)
        computed = (rows @ w[0]) * weights.unsqueeze(1)
        back = ours.send(computed, received, sent)[order.argsort()]
    y = reinterpret(reinterpret_mesh(back, dense), "tp", src=V, dst=S(0))
    return reinterpret(y, "dp", src=V, dst=S(0))


@spmd.local_map(out_types=(peer.OWN, spmd.PartitionSpec(("dp", "tp"), None)))
def exchanged(x: Tensor, gates: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    with spmd.set_current_mesh(device_mesh(SPARSE)):
        x, gates, ids, w = (
            peer.presented(held, {"ep": spmd.V}) for held in (x, gates, ids, w)
        )
        sent, received = peer.splits(ids)
        order = ids.argsort(stable=True)
        rows = peer.send(x[order], sent, received)
        weights = raw.send(gates[order], sent, received)
        computed = (rows @ w[0]) * weights.unsqueeze(1)
        back = peer.send(computed, received, sent)[order.argsort()]
    return peer.presented(back, peer.OWN)


def after_spmd_types(x: Tensor, gates: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    for held in (x, gates, ids, w):
        peer.declare_cut(held)
    return exchanged(x, gates, ids, w)
