"""FSDP2 averages over `edp`, as it does by itself. With `ep` ranks for each of these, the
gradients of the experts are `ep` times too large beside all others (B10: pytorch #160285,
torchtitan #1551; the same in DeepSpeed, B12). A wrapper that averages is refused here at
the first forward, since a Partial is a sum. `spmd_types` does not look at wrappers."""

from torch import Tensor
from torch.distributed.fsdp import fully_shard

from examples.migrate.fsdp2_with_ep import after_placements as ours
from examples.migrate.fsdp2_with_ep import after_spmd_types as peer
from examples.migrate.fsdp2_with_ep import before as raw
from examples.migrate.fsdp2_with_ep.one_device import TOKENS
from placements import global_mean, reduce_gradients, unchecked
from placements.testing import device_mesh


def before(x: Tensor, gates: Tensor, w: Tensor) -> Tensor | None:
    experts = fully_shard(raw.Experts(w), mesh=device_mesh()["edp"])
    return raw.trained(experts, x, gates)


def after_placements(x: Tensor, gates: Tensor, w: Tensor) -> Tensor | None:
    with unchecked():
        experts = fully_shard(ours.Experts(w), mesh=device_mesh()["edp"])
    total = experts(x.detach(), gates.detach()).square().sum()
    global_mean(total, TOKENS, ("edp", "ep")).backward()
    reduce_gradients(experts)
    return experts.w.grad


def after_spmd_types(x: Tensor, gates: Tensor, w: Tensor) -> Tensor | None:
    experts = fully_shard(peer.Experts(w), mesh=device_mesh()["edp"])
    return peer.trained(experts, x, gates)
