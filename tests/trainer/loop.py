"""A training loop in which every feature of the table is an option."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from placements import (
    Mesh,
    Shard,
    assert_type,
    clip_grad_norm_,
    fully_shard,
    global_state_dict,
    load_sharded_state_dict,
    reduce_gradients,
    set_current_mesh,
    sharded_state_dict,
    split,
    typecheck,
    verify,
)
from placements.testing import device_mesh
from spmd_moe import (
    MoE,
    Parallel,
    keep_routings,
    load_balance_loss,
    sequence_balance_loss,
    update_expert_bias,
    z_loss,
)
from spmd_moe.training.language_model import LanguageModel
from spmd_moe.training.recipe import Recipe
from spmd_moe.training.text import batch_of

# Sequences of 7 positions are cut unevenly. Four sequences are two microbatches for each of
# two dp ranks.
RECIPE = Recipe(
    layers=2, dim=8, heads=2, hidden_dim=8, num_experts=4, seq_len=7, batch=4, seed=3
)
MAX_NORM = 0.5

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    # A gradient that is off by a factor shows in SGD; Adam would hide it.
    "SGD": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.5),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.5, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.5, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


@dataclass(frozen=True)
class Options:
    """What a trainer does. The defaults are the plain loop in float64."""

    dtype: torch.dtype = torch.float64
    autocast: bool = False
    checkpointing: str = ""  # "reentrant", "not reentrant", "selective"
    around: type[nn.Module] = MoE
    microbatches: int = 1
    frozen: str = ""  # part of the names of parameters
    set_to_none: bool = True
    optimizer: str = "SGD"
    clip: str = ""  # "placements", "torch"
    auxiliary: bool = False
    copied: str = ""  # "deepcopy", "pickle"
    functional: bool = False
    transformed: bool = False  # gradients by torch.func.grad_and_value
    meta: bool = False
    compiled: bool = False  # every MoE layer, as one graph
    resumed: str = ""  # after the first step, by "dcp" or "dcp async"
    directory: str = ""  # where it is saved
    steps: int = 2
    step_inside: bool = False  # the optimizer steps inside the block
    checking: str = "first"  # "first" step, "typecheck" or "verify" at all steps, "never"


@dataclass
class Trained:
    """Losses by step; at the end global values and gradients by name, on every rank."""

    losses: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """Where it runs: the ranks, and how parameters are held."""

    parallel: Parallel = Parallel()  # noqa: RUF009 - frozen
    fsdp: bool = False

    def __str__(self) -> str:
        p = self.parallel
        degrees = {n: getattr(p, n) for n in ("dp", "tp", "ep") if getattr(p, n) > 1}
        words = [f"{name}={n}" for name, n in degrees.items()]
        words += ["sequence parallel"] * p.sequence_parallel + ["`fully_shard`"] * self.fsdp
        return ", ".join(words) or "no mesh"


def train(setting: Setting, options: Options) -> Trained:
    """Train on this rank."""
    parallel = setting.parallel
    if dist.is_initialized():
        dense, sparse = (
            device_mesh(sizes) for sizes in (parallel.dense_mesh(), parallel.sparse_mesh())
        )
        meshes: Any = (dense, sparse)
    else:
        meshes = Mesh(parallel.dense_mesh()), Mesh(parallel.sparse_mesh())
    with set_current_mesh(meshes[0]):
        return _train(setting, options, meshes)


def _train(setting: Setting, options: Options, meshes: Any) -> Trained:
    model = _model(setting, options, meshes)
    optimizer = _optimizer(model, options)
    found = Trained()
    for step in range(options.steps):
        if options.resumed and step == 1:
            model, optimizer = _resumed(setting, options, meshes, model, optimizer)
        optimizer.zero_grad(set_to_none=options.set_to_none)
        batch = list(_microbatches(model, options, meshes, step))
        with _checking(options, step):
            total: Any = 0.0
            for ids_BL, targets_BL in batch:
                assert_type(ids_BL, model.ids)
                assert_type(targets_BL, model.ids)
                total = total + _backward(model, options, ids_BL, targets_BL)
            reduce_gradients(model, meshes=meshes)
            update_expert_bias(model)
            if options.step_inside:
                _clip(model, options, meshes)
                optimizer.step()
        if not options.step_inside:
            _clip(model, options, meshes)
            optimizer.step()
        found.losses.append(float(total))
    found.state = global_state_dict(model, meshes=meshes)
    found.gradients = _gradients(model, meshes)
    return found


def _gradients(model: nn.Module, meshes: Any) -> dict[str, Tensor]:
    """The global gradients: they are cut as the parameters are, so they take their place."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.zero_()
            else:
                parameter.copy_(parameter.grad)
    every = global_state_dict(model, meshes=meshes)
    return {name: every[name] for name, _ in model.named_parameters()}


def _optimizer(model: nn.Module, options: Options) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return OPTIMIZERS[options.optimizer](trained)


def _resumed(
    setting: Setting, options: Options, meshes: Any, *old: Any
) -> tuple[LanguageModel, torch.optim.Optimizer]:
    """Save, and go on with a model that was made anew and an optimizer without state."""
    state = sharded_state_dict(*old, meshes=meshes)
    alone = not dist.is_initialized()
    if options.resumed == "dcp":
        dcp.save(state, checkpoint_id=options.directory, no_dist=alone)
    else:
        saved: Any = dcp.async_save(state, checkpoint_id=options.directory, no_dist=alone)
        saved.result()
    model = _model(setting, options, meshes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = _optimizer(model, options)
    load_sharded_state_dict(model, options.directory, optimizer, meshes=meshes)
    return model, optimizer


def _model(setting: Setting, options: Options, meshes: Any) -> LanguageModel:
    with torch.device("meta") if options.meta else nullcontext():
        model = LanguageModel(RECIPE, setting.parallel, meshes[1])
    model = model.to(options.dtype)
    if options.meta and not setting.fsdp:
        model = model.to_empty(device="cpu")
        model.reset_parameters()
    if options.copied == "deepcopy":
        model = copy.deepcopy(model)
    elif options.copied == "pickle":
        model = pickle.load(io.BytesIO(pickle.dumps(model)))
    if options.frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(options.frozen not in name)
    if options.checkpointing:
        for module in model.modules():
            if isinstance(module, options.around):
                _checkpointed(module, options.checkpointing)
    if setting.fsdp:
        for block in model.blocks:
            fully_shard(block, meshes=meshes)
        fully_shard(model, meshes=meshes)
    if options.meta and setting.fsdp:  # every rank draws its own shards
        model = model.to_empty(device="cpu")
        model.reset_parameters()
    if options.compiled:
        for module in model.modules():
            if isinstance(module, MoE):
                module.compile(fullgraph=True, backend="aot_eager")
    return model


def _checkpointed(module: nn.Module, kind: str) -> None:
    """Have a module computed again in backward, as trainers wrap forward."""
    forward = module.forward
    ways: dict[str, dict[str, Any]] = {
        "reentrant": {"use_reentrant": True},
        "not reentrant": {"use_reentrant": False},
        "selective": {"use_reentrant": False, "context_fn": _keeps_products},
    }

    def again(x: Tensor, **kwargs: Any) -> Any:
        if kind == "reentrant":  # it takes no keywords
            return checkpoint(lambda x: forward(x, **kwargs), x, **ways[kind])
        return checkpoint(forward, x, **kwargs, **ways[kind])

    module.forward = again  # type: ignore[method-assign]


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _keeps_products() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _checking(options: Options, step: int) -> AbstractContextManager[Any]:
    if options.checking == "verify":
        return verify()
    checked = options.checking == "typecheck" or (options.checking == "first" and not step)
    return typecheck() if checked else nullcontext()


def _microbatches(
    model: LanguageModel, options: Options, meshes: Any, step: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's pieces of every microbatch; dp ranks take a part of each."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    bare = {a: Shard(t.dim) if isinstance(t, Shard) else t for a, t in model.ids.items()}
    parts = zip(
        *(ids.chunk(options.microbatches) for ids in batch_of(RECIPE, step)), strict=True
    )
    for part in parts:
        ids_BL, targets_BL = (split(ids_BL, bare, meshes[0])[rank] for ids_BL in part)
        yield ids_BL, targets_BL


def _backward(
    model: LanguageModel, options: Options, ids_BL: Tensor, targets_BL: Tensor
) -> Tensor:
    """Add the gradients of a microbatch; return its loss."""
    if not options.transformed:
        loss = _loss(model, options, ids_BL, targets_BL)
        loss.backward()
        return loss.detach()
    own = dict(model.named_parameters())

    def loss_of(state: dict[str, Tensor]) -> Tensor:
        scores_BLU = torch.func.functional_call(model, state, (ids_BL,))
        return model.loss(scores_BLU, targets_BL)

    gradients, loss = torch.func.grad_and_value(loss_of)(own)
    for name, gradient in gradients.items():
        old = own[name].grad
        new = gradient.detach()
        own[name].grad = new if old is None else old + new
    return loss.detach()


def _loss(
    model: LanguageModel, options: Options, ids_BL: Tensor, targets_BL: Tensor
) -> Tensor:
    """The loss of a microbatch: its share of the mean over the whole batch."""
    kept = keep_routings(model) if options.auxiliary else nullcontext([])
    cast = torch.autocast("cpu", torch.bfloat16) if options.autocast else nullcontext()
    with cast, kept as routings:
        if options.functional:
            state = dict(model.named_parameters())
            scores_BLU = torch.func.functional_call(model, state, (ids_BL,))
        else:
            scores_BLU = model(ids_BL)
    loss = model.loss(scores_BLU.to(_wide(scores_BLU)), targets_BL)
    for routed in routings:
        loss = loss + 0.1 * load_balance_loss(routed)
        loss = loss + 0.2 * sequence_balance_loss(routed) + 0.01 * z_loss(routed)
    return loss


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _clip(model: LanguageModel, options: Options, meshes: Any) -> None:
    if options.clip == "placements":
        clip_grad_norm_(model, MAX_NORM, meshes=meshes)
    elif options.clip == "torch":
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
