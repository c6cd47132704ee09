"""The placements of the gradients were passed in one of two branches only, so the default
held in the other: the gradient of the tokens counts as complete on every rank, and all
layers below learn from one rank's share of it (B03: torchtitan #4054). `region` has no
default. In `spmd_types` a value whose gradient is complete is an I, and the body refuses
to mix it with the cut weights; it does so only since it looks into the body."""

import spmd_types as spmd
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

from examples.migrate.local_map.one_device import experts
from placements import I, P, R, S, all_reduce, convert, region
from placements.testing import device_mesh

EXPERT_PARALLEL = False


def before(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    mesh = device_mesh()
    x_whole = DTensor.from_local(x, mesh, [Replicate()])
    w1_cut = DTensor.from_local(w1, mesh, [Shard(1)])
    w2_cut = DTensor.from_local(w2, mesh, [Shard(0)])
    grads = ([Partial()], [Shard(1)], [Shard(0)])
    run = local_map(
        experts,
        out_placements=[Partial()],
        in_placements=([Replicate()], [Shard(1)], [Shard(0)]),
        in_grad_placements=grads if EXPERT_PARALLEL else None,
        device_mesh=mesh,
    )
    return run(x_whole, w1_cut, w2_cut).redistribute(placements=[Replicate()]).to_local()


def after_placements(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    run = region(
        experts,
        ins=[{"tp": R}, {"tp": S(1)}, {"tp": S(0)}],
        grads=[{"tp": P if EXPERT_PARALLEL else R}, {"tp": S(1)}, {"tp": S(0)}],
        outs={"tp": P},
    )
    y = run(convert(x, "tp", src=I, dst=R), w1, w2)
    return all_reduce(y, "tp", src=P, dst=I)


@spmd.local_map(
    in_types=({"tp": spmd.I}, {"tp": spmd.S(1)}, {"tp": spmd.S(0)}),
    out_types={"tp": spmd.P},
)
def run(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return spmd.reinterpret(experts(x, w1, w2), "tp", src=spmd.V, dst=spmd.P)


def after_spmd_types(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    spmd.assert_type(x, {"tp": spmd.I})
    spmd.assert_type(w1, {"tp": spmd.S(1)})
    spmd.assert_type(w2, {"tp": spmd.S(0)})
    return spmd.all_reduce(run(x, w1, w2), "tp", src=spmd.P, dst=spmd.I)
