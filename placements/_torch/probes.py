"""Probes: does this torch have what the project uses of its inside?

`require` runs the probes of one part of the project when that part is first used, and names
everything that is missing in one error.

- "checking": `typecheck()` and `verify()`.
- "modules": modules whose state keeps its precision.
- "simulating": `run_ranks` on simulated ranks.
- "drawing": the law of call forms.
- "saving": checkpoints in pieces.
- "sharding": `fully_shard`, and the look at what FSDP2 does around typed modules.
- "peers": second opinions, DTensor and functional collectives on a fake process group.
"""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import importlib
import pickle
import sys
from collections.abc import Callable
from functools import partial
from operator import call
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from placements._torch import guarded
from placements._torch.bodies import body_of
from placements._torch.distributed import OBJECT_TO_TENSOR, TIMEOUT, functional
from placements._torch.fsdp import (
    HANDS_THROUGH,
    has_groups_of_parameters,
    keeps_hooks_of_ddp,
)
from placements._torch.interception import (
    REGISTRATION_HOOKS,
    SCRIPTED,
    STEP_HOOKS,
    count_modes,
    mode_at,
    pop_mode,
    push_mode,
)
from placements._torch.schemas import kind_of, op_name, schemas_of
from placements._torch.sharded_tensors import GlobalView
from placements._torch.supported import inside, unsupported
from placements._torch.tensors import (
    backward_node,
    backward_pass,
    base_of,
    hooks_of,
    in_backward,
    in_transform,
    leaf_of,
    memory_of,
    version_of,
)


class Use(NamedTuple):
    """One thing of torch's inside: its name, what it is for, and a check that it works."""

    name: str
    purpose: str
    probe: Callable[[], object]  # raises, or returns False, where torch does not have it


def _is_there(path: str, purpose: str) -> Use:
    return Use(path, purpose, partial(inside, path))


def _asks_modules() -> bool:
    asked: list[str] = []

    class Probe(nn.Module):
        def _apply(self, *args: Any, **kwargs: Any) -> Self:
            asked.append("_apply")
            return super()._apply(*args, **kwargs)

        def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
            asked.append("_load_from_state_dict")
            super()._load_from_state_dict(*args, **kwargs)

    probe = Probe()
    probe.register_parameter("w", nn.Parameter(torch.empty(1)))
    nn.Sequential(probe).half().load_state_dict({"0.w": torch.empty(1)})
    held = vars(probe)["_parameters"]["w"]
    return asked == ["_apply", "_load_from_state_dict"] and held is probe.w


def _asks_before_registering() -> bool:
    asked: list[str] = []
    probe, key = nn.Module(), object()

    def hook(module: nn.Module, name: str, value: Any) -> None:
        if module is probe:
            asked.append(name)

    try:
        for hooks in REGISTRATION_HOOKS:
            hooks[key] = hook
        probe.register_buffer("b", torch.empty(1))
        probe.b = torch.empty(1)
        probe.w = nn.Parameter(torch.empty(1))
    finally:
        for hooks in REGISTRATION_HOOKS:
            hooks.pop(key, None)
    return asked == ["b", "b", "w"]


def _asks_before_a_step() -> bool:
    """Look where torch puts such a hook. Making an optimizer would import torch.compile."""

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None: ...

    handle = register_optimizer_step_pre_hook(hook)
    is_there = hook in STEP_HOOKS.values()
    handle.remove()
    return is_there


def _can_forget_meshes() -> bool:
    name = "torch.distributed.tensor"
    return name not in sys.modules or hasattr(
        importlib.import_module(f"{name}.debug"), "_clear_sharding_prop_cache"
    )


def _a_mode_can_be_pushed() -> bool:
    if not all(map(callable, (push_mode, pop_mode, count_modes, mode_at))):
        return False
    mode, at = torch.overrides.BaseTorchFunctionMode(), count_modes()
    calls = [partial(push_mode, mode), partial(mode_at, at), pop_mode]
    _, found, popped = map(call, calls)  # together: a signal must not leave it there
    return found is popped is mode


def _has_functional_collectives() -> None:
    if dist.is_available():
        gathers = "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"
        for name in ("all_reduce", *gathers, "wait_tensor"):
            getattr(functional, name)


def _can_bind_apply() -> bool:
    apply = vars(torch.autograd.Function)["apply"]
    return callable(apply.__get__(None, torch.autograd.Function))


def _has_group_methods() -> bool:
    wanted = ("allreduce", "allgather", "reduce_scatter", "alltoall", "broadcast", "send")
    return not dist.is_available() or all(n in vars(dist.ProcessGroup) for n in wanted)


def _says_timeouts() -> bool:
    if not dist.is_available():
        return True
    options = inside("torch._C._distributed_c10d.Backend.Options")
    return hasattr(dist.ProcessGroup, "_get_backend") and hasattr(options, TIMEOUT)


def _makes_tensors_of_objects() -> bool:
    return not dist.is_available() or callable(
        vars(dist.distributed_c10d)[OBJECT_TO_TENSOR]
    )


def _counts_writes() -> bool:
    x = torch.zeros(2)
    before = version_of(x)
    x.add_(1)
    return version_of(x) == before + 1 and base_of(x[:1]) is x


def _finds_the_leaf() -> bool:
    """Check that a hook of a leaf can find the node of the leaf, and follow it."""
    leaf, found = torch.zeros(1, requires_grad=True), list[Any]()

    def hook(grad: Tensor) -> None:
        node = backward_node()
        found.append(leaf_of(node) is leaf and backward_pass() != -1)
        found.append(callable(node.register_prehook))

    with torch.enable_grad():
        handle = leaf.register_hook(hook)
        torch.autograd.backward((leaf * 2).sum())
    handle.remove()
    return found == [True, True]


def _calls_hooks_in_dicts() -> bool:
    """Check that a hook of a leaf that was replaced where autograd keeps it is called."""
    leaf, called = torch.zeros(1, requires_grad=True), list[int]()

    def call(which: int, _: Tensor) -> None:
        called.append(which)

    never = partial(call, -1)
    handles = [
        leaf.register_hook(never),
        leaf.register_post_accumulate_grad_hook(never),
    ]
    for k, hooks in enumerate(hooks_of(leaf)):
        for key in hooks:
            hooks[key] = partial(call, k)
    with torch.enable_grad():
        torch.autograd.backward((leaf * 2).sum())
    for handle in handles:
        handle.remove()
    return called == [0, 1]


def _saves_attributes() -> bool:
    """Check that attributes of a tensor are saved, but for those that are left out."""
    x = torch.zeros(1)
    x._placements_probe = x.kept = 1  # pyright: ignore[reportAttributeAccessIssue]
    saved = pickle.dumps(x)
    return b"kept" in saved and b"_placements_probe" not in saved


def _shows_the_parts() -> bool:
    seen: list[str] = []

    class Watches(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    with Watches():
        body_of(nn.functional.gaussian_nll_loss)(*torch.ones(3, 2))
        body_of(nn.init.constant_)(torch.ones(2), 1.0)
    whole = {"gaussian_nll_loss", "constant_"}
    return not whole & set(seen) and {"log", "fill_"} <= set(seen)


def _has_schemas() -> bool:
    """Check that schemas say the names, types and defaults of an operator's arguments."""
    told = {s.overload_name: s.arguments for s in schemas_of("sum")}
    dim, keepdim = told["dim_IntList"][1:3]
    return (
        (str(dim.name), str(dim.type)) == ("dim", "Optional[List[int]]")
        and keepdim.has_default_value()
        and bool(told["dim_IntList"][3].kwarg_only)
        and schemas_of("no_such_operator") == []
    )


def _memory_keeps_attributes() -> bool:
    x = torch.zeros(2)
    memory_of(x).placements_probe = True
    return memory_of(x.detach()[:1]).placements_probe


CHECKING: tuple[Use, ...] = (
    _is_there("torch._C.DisableTorchFunction", "call torch without being checked"),
    _is_there("torch._C._is_torch_function_all_disabled", "know who is not checked"),
    Use("torch._C._push_on_torch_function_stack", "begin checking", _a_mode_can_be_pushed),
    Use("torch.autograd.Function.apply", "find undeclared Functions", _can_bind_apply),
    Use("dist.ProcessGroup.allreduce, ...", "find raw collectives", _has_group_methods),
    Use(f"dist.distributed_c10d.{OBJECT_TO_TENSOR}", "find collectives of objects",
        _makes_tensors_of_objects),
    Use("the hooks of nn.Module.register_buffer and register_parameter",
        "find state that is replaced", _asks_before_registering),
    Use("the hooks of Optimizer.step", "find gradients that are not summed",
        _asks_before_a_step),
    Use("torch._ops.OpOverload", "name an operator",
        lambda: op_name(torch.ops.aten.mm.default) == "aten::mm"),
    Use("nn.functional.has_torch_function, ...", "look into functions in Python",
        _shows_the_parts),
    _is_there("torch._jit_internal.boolean_dispatched", "bind arguments to their slots"),
    Use("torch._C._jit_get_schemas_for_operator", "bind arguments to their slots",
        lambda: kind_of(schemas_of("sum")[0].arguments[0]) == "Tensor"),
    Use("torch._C.ScriptFunction, torch._C.ScriptMethod", "see what scripts write",
        lambda: all("__call__" in vars(scripted) for scripted in SCRIPTED)),
    Use("torch._C._are_functorch_transforms_active, forward_ad._current_level",
        "know that a transform is open", lambda: not in_transform()),
    Use("Tensor._version, Tensor._base", "find writes to memory", _counts_writes),
    Use("torch.UntypedStorage, one object for each memory", "note what was summed",
        _memory_keeps_attributes),
    Use("torch._C._current_graph_task_id", "tell backward from forward",
        lambda: not in_backward() and not guarded.in_backward),
    _is_there("torch._check", "exchange rows in compiled code"),
    Use("torch._C._current_autograd_node, AccumulateGrad.variable, Node.register_prehook",
        "follow hooks that reduce a gradient", _finds_the_leaf),
    Use("Tensor._backward_hooks, _post_accumulate_grad_hooks", "check hooks",
        _calls_hooks_in_dicts),
    Use("Tensor.__getstate__, Tensor.__reduce_ex__", "save tensors without their types",
        _saves_attributes),
    Use("torch.ops._c10d_functional", "communicate", _has_functional_collectives),
)  # fmt: skip

MODULES: tuple[Use, ...] = (
    Use("nn.Module._apply, nn.Module._load_from_state_dict",
        "keep the precision of state that is cast or loaded", _asks_modules),
)  # fmt: skip


_C10D = "torch.distributed.distributed_c10d"


SIMULATING: tuple[Use, ...] = (
    *CHECKING,
    _is_there(f"{_C10D}._World", "give each simulated rank groups of its own"),
    _is_there(f"{_C10D}._world", "give each simulated rank groups of its own"),
    _is_there(f"{_C10D}._backend", "give each simulated rank groups of its own"),
    _is_there(f"{_C10D}._default_pg_init_method", "give each rank groups of its own"),
    *(
        _is_there(f"torch._C._distributed_c10d.{name}", "set up and drop groups")
        for name in (
            "_unregister_all_process_groups", "_set_thread_isolation_mode",
            "_set_global_rank",
        )
    ),
    _is_there("torch.distributed.device_mesh.get_backend", "tell meshes of ranks apart"),
    _is_there("torch.distributed.Backend._plugins", "register the backend"),
    Use("torch.distributed.tensor.debug._clear_sharding_prop_cache",
        "forget meshes of groups that are gone", _can_forget_meshes),
    _is_there("torch._C._len_torch_dispatch_stack", "hide a backend from modes"),
    _is_there("torch.utils._python_dispatch._disable_current_modes", "hide a backend"),
    _is_there("torch.utils._pytree.tree_flatten", "find tensors in results"),
)  # fmt: skip

PEERS: tuple[Use, ...] = (
    _is_there("torch.testing._internal.distributed.fake_pg.FakeStore", "a fake group"),
    _is_there("torch.distributed.tensor._utils.ExplicitRedistributionContext",
              "let DTensor refuse what it would redistribute"),
    _is_there("torch.distributed._functional_collectives.all_to_all_single_autograd",
              "programs in the words of torch"),
)  # fmt: skip


def _asks_tensors_for_pieces() -> bool:
    """Check that the planners of checkpoints ask a tensor for its pieces."""
    from torch.distributed.checkpoint.default_planner import (
        create_default_local_save_plan,
    )
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.utils import find_state_dict_object

    class Piece(NamedTuple):
        offsets: tuple[int, ...] = (2,)
        sizes: tuple[int, ...] = (1,)
        local: tuple[int, ...] = (0,)

    view = GlobalView((4,), torch.ones(1), [Piece()])
    plan: SavePlan = create_default_local_save_plan({"x": view}, True)
    (item,) = plan.items
    held: Any = find_state_dict_object({"x": view}, item.index)
    return view.shape == (4,) and item.index.offset == (2,) and held.shape == (1,)


def _stores_by_file() -> bool:
    made = inside("torch.distributed.checkpoint.filesystem._StorageInfo")("file", 1, 2)
    return (made.relative_path, made.offset, made.length) == ("file", 1, 2)


SAVING: tuple[Use, ...] = (
    Use("__create_write_items__, __get_tensor_shard__, Tensor._make_wrapper_subclass",
        "save pieces of tensors", _asks_tensors_for_pieces),
    Use("torch.distributed.checkpoint.filesystem._StorageInfo", "read where pieces are",
        _stores_by_file),
)  # fmt: skip

_FSDP = "torch.distributed.fsdp._fully_shard"

SHARDING: tuple[Use, ...] = (
    Use(f"{_FSDP}._fsdp_param_group.FSDPParamGroup", "see what FSDP2 reduces, and over "
        "which ranks", has_groups_of_parameters),
    _is_there(f"{_FSDP}._fsdp_param_group.{HANDS_THROUGH}", "keep the types of inputs"),
    _is_there(f"{_FSDP}._fsdp_init._get_mesh_info", "name the copies and shards of a mesh"),
    Use("ProcessGroup._get_backend, Backend.Options._timeout", "give groups the timeout "
        "of others", _says_timeouts),
    Use("DistributedDataParallel._comm_hooks", "see whether DDP sums", keeps_hooks_of_ddp),
)  # fmt: skip

DRAWING: tuple[Use, ...] = (
    Use("torch._C._jit_get_schemas_for_operator", "draw calls of every overload of an op",
        _has_schemas),
)  # fmt: skip

PARTS = {
    "checking": CHECKING, "modules": MODULES, "simulating": SIMULATING, "peers": PEERS,
    "drawing": DRAWING, "sharding": SHARDING, "saving": SAVING,
}  # fmt: skip

_works: set[str] = set()


def require(part: str) -> None:
    """Raise UnsupportedTorchError if this torch lacks what a part needs; looked at once."""
    if part in _works:
        return
    probed = map(_probed, PARTS[part])
    missing = [f"{use.name} (to {use.purpose}){why}" for use, why in probed if why]
    if missing:
        raise unsupported(missing)
    _works.add(part)


def _probed(use: Use) -> tuple[Use, str]:
    try:
        works = use.probe() is not False
    except Exception as error:
        return use, f": {type(error).__name__}: {error}"
    return use, "" if works else ": it behaves differently"
