"""All that is used of torch beyond its public API, in one place, each use with a probe.

A new torch may change any of it. `require` runs the probes of one part of the project when
that part is first used, and names what is missing in one error. No other file uses torch's
internals (`tests/placements/test_torch.py` looks).

- "checking": `typecheck()` and `verify()`.
- "modules": modules whose state keeps its precision.
- "simulating": `run_ranks` on simulated ranks.
- "drawing": the law of call forms.
- "peers": second opinions, DTensor and functional collectives on a fake process group.
"""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import importlib
import inspect
import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from operator import call
from types import FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
import torch.distributed as dist
import torch.utils._pytree as _pytree
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

# The versions that were tested; `docs/versions.md` says what ran on each, with counts.
TESTED = ("2.13.0", "2.14.1", "2.15.0")


class UnsupportedTorchError(RuntimeError):
    """The installed torch lacks something that this project stands on."""


class Use(NamedTuple):
    """One thing of torch's inside: its name, what it is for, and a check that it works."""

    name: str
    purpose: str
    probe: Callable[[], object]  # raises, or returns False, where torch does not have it


def _of(path: str) -> Any:
    """The object of a dotted name that starts with a module."""
    head, *rest = path.split(".")
    found: Any = importlib.import_module(head)
    for name in rest:
        if not hasattr(found, name):
            found = importlib.import_module(f"{found.__name__}.{name}")
        else:
            found = getattr(found, name)
    return found


def _is_there(path: str, purpose: str) -> Use:
    return Use(path, purpose, partial(_of, path))


_C: Any = torch._C

# Torch functions called inside are seen by no mode and no subclass.
unseen: Any = getattr(_C, "DisableTorchFunction", nullcontext)

# The stack of torch-function modes of this thread. The methods of the mode itself are
# Python; these are C, so that a signal cannot come between them and what goes with them.
push_mode: Any = getattr(_C, "_push_on_torch_function_stack", None)
pop_mode: Any = getattr(_C, "_pop_torch_function_stack", None)
count_modes: Any = getattr(_C, "_len_torch_function_stack", None)
mode_at: Any = getattr(_C, "_get_function_stack_at", None)

# Nested tuples, lists and dicts of tensors.
pytree: Any = _pytree

# The function by which every collective of Python objects makes tensors of them.
OBJECT_TO_TENSOR = "_object_to_tensor"


def modes() -> list[Any]:
    """The torch-function modes of this thread, outermost first."""
    return [mode_at(k) for k in range(count_modes())]


# The collectives under torch's functional ones, which `torch.compile`, the fake backend and
# autograd all accept.
functional: Any = torch.ops._c10d_functional


def op_name(func: object) -> str | None:
    """`aten::mm` of an operator; None of any other function."""
    if isinstance(func, torch._ops.OpOverload):
        func = func.overloadpacket
    if isinstance(func, torch._ops.OpOverloadPacket):
        return str(func._qualified_op_name)
    return None


def schemas_of(name: str) -> list[Any]:
    """The schemas of all overloads of an operator `aten::name`; none if there is none."""
    return _C._jit_get_schemas_for_operator(f"aten::{name}")


# What torch.jit.script makes: functions, and methods of modules.
SCRIPTED: tuple[Any, ...] = (_C.ScriptFunction, _C.ScriptMethod)


def in_transform() -> bool:
    """Whether code runs inside vmap, grad or another transform of torch.func."""
    return _C._functorch.peek_interpreter_stack() is not None


def stance() -> tuple[Any, str, Any] | None:
    """Where torch.compile keeps its stance, and the one that runs code as it is written.

    None if nothing was compiled yet in this process: that is not imported for nothing.
    """
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return None
    return frames, "_stance", frames.DynamoStance("force_eager")


def is_eager() -> bool:
    """Whether torch.compile has the stance that runs code as it is written."""
    kept = stance()
    return kept is not None and getattr(kept[0], kept[1]).stance == "force_eager"


def version_of(tensor: Tensor) -> int:
    """How often a tensor's memory was written in place."""
    return -1 if tensor.is_inference() else tensor._version


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of."""
    return tensor._base


def memory_of(tensor: Tensor) -> Any:
    """The memory of a tensor, one object for all its views, which keeps attributes.

    None of a tensor that has none of its own: inside `vmap`.
    """
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


def storage_identity(storage: torch.UntypedStorage) -> int:
    """A number that is the same for all names of one memory."""
    return storage._cdata


def on_accumulation(leaf: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `hook(leaf)` each time backward has added to the gradient of a leaf."""
    return leaf.register_post_accumulate_grad_hook(hook)


def on_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `hook(gradient)` each time backward has the gradient of a tensor."""
    return tensor.register_hook(hook)


def in_backward() -> bool:
    """Whether autograd is at work, as it is when a checkpoint computes again."""
    return backward_pass() != -1


def backward_pass() -> int:
    """A number for the backward pass that runs in this thread; -1: none does."""
    return _C._current_graph_task_id()


def backward_node() -> Any:
    """The node whose hooks or backward are running in this thread; None: no backward."""
    return _C._current_autograd_node() if in_backward() else None


def leaf_of(node: Any) -> Tensor | None:
    """The leaf to whose gradient a node adds; None of any other node."""
    return getattr(node, "variable", None)


def before_node(node: Any, hook: Callable[[Tensor | None], None]) -> RemovableHandle:
    """Call `hook(gradient)` for what reaches a node, after the hooks of its tensors."""

    def each(grads: tuple[Tensor | None, ...]) -> None:
        for grad in grads:
            hook(grad)

    return node.register_prehook(each)


def leave_out_of_pickles(prefix: str) -> None:
    """Save tensors without those of their attributes whose names begin with `prefix`.

    torch pickles the attributes of a tensor with it, so a file would hold classes that
    `torch.load(weights_only=True)` refuses, and that whoever loads it may not have.
    A tensor without such attributes is pickled as ever. `deepcopy` does not come here.
    """
    original = cast(Any, Tensor).__getstate__
    if getattr(original, "left_out", None) == prefix:
        return  # the package was imported twice

    def __getstate__(self: Tensor) -> Any:  # noqa: N807
        state: Any = original(self)
        if isinstance(state, tuple):  # of a subclass with slots
            attributes, *rest = cast(tuple[Any, ...], state)
            return (_without(prefix, attributes), *rest)
        return _without(prefix, state)

    cast(Any, __getstate__).left_out = prefix
    cast(Any, Tensor).__getstate__ = __getstate__


def _without(prefix: str, attributes: Any) -> Any:
    if not attributes or not any(name.startswith(prefix) for name in attributes):
        return attributes
    return {k: v for k, v in attributes.items() if not k.startswith(prefix)}


# What torch.distributed keeps once per process; the simulator has it once per rank.
_GLOBALS = ("_world", "_backend", "_default_pg_init_method")


def distributed_globals() -> dict[str, Any]:
    return {name: getattr(dist.distributed_c10d, name) for name in _GLOBALS}


def set_distributed_globals(values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(dist.distributed_c10d, name, value)


def world() -> Any:
    """What torch.distributed keeps of groups, in a process that has none."""
    made: Any = dist.distributed_c10d._World()
    return made


def groups() -> list[Any]:
    """All process groups of this process, or of this simulated rank."""
    return list(distributed_globals()["_world"].pg_map)


def groups_of(device_mesh: Any) -> list[Any]:
    """The process groups that a DeviceMesh made for its axes."""
    registry = getattr(device_mesh, "_pg_registry", None)  # of an object: no probe finds it
    if registry is None:
        raise unsupported(["DeviceMesh._pg_registry (to keep the groups of a mesh)"])
    return list(registry.values())


def unregister_groups() -> None:
    _C._distributed_c10d._unregister_all_process_groups()


def isolate_threads(isolated: bool) -> None:
    """Whether each thread finds the process groups that it registered itself."""
    _C._distributed_c10d._set_thread_isolation_mode(isolated)


def set_global_rank(rank: int) -> None:
    _C._distributed_c10d._set_global_rank(rank)


def forget_meshes_in_dtensor() -> None:
    """DTensor remembers results together with the mesh, hence with its dead groups."""
    if "torch.distributed.tensor" in sys.modules:
        _of("torch.distributed.tensor.debug._clear_sharding_prop_cache")()


def has_backend(name: str) -> bool:
    plugins: Any = dist.Backend._plugins
    return name.upper() in plugins


def without_dispatch_modes() -> Any:
    """A block in which no dispatch mode sees what is called."""
    if _C._len_torch_dispatch_stack() == 0:
        return nullcontext()
    return _of("torch.utils._python_dispatch._disable_current_modes")()


class WatchesItsState(nn.Module):
    """A module that is asked when its state is converted or loaded.

    `.bfloat16()`, `.to(...)` and `to_empty` of a module, or of one around it, go through
    `_apply`, and `load_state_dict` goes through `_load_from_state_dict`. torch has no
    public name for either.

    Inside `typecheck()` neither is checked op by op. Types are declared of the module and
    survive it, and before the module was called its tensors have none yet.
    """

    # Names of tensors that are converted with the module but are no buffers of it. What
    # treats all buffers alike, as DDP does when it sends those of rank 0 to all ranks,
    # does not see them.
    unregistered: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        require("modules")

    def converted(self, x: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """What becomes of a parameter or buffer; `convert` is what torch would do."""
        return convert(x)

    def before_loading(self, state: dict[str, Any], prefix: str) -> None:
        """Called with the names and values that are about to be loaded."""

    def after_loading(self, state: dict[str, Any], prefix: str) -> None:
        """Called when they have been loaded."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with unseen():
            for name in self.unregistered:
                setattr(self, name, self.converted(getattr(self, name), fn))
            return super()._apply(partial(self.converted, convert=fn), recurse)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self.before_loading(state_dict, prefix)
        with unseen():
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
            self.after_loading(state_dict, prefix)


def held_by(module: nn.Module, name: str) -> tuple[Tensor | None, Tensor | None]:
    """The buffer and the parameter of that name; a module that is being made has none."""
    state = vars(module)
    buffers, parameters = state.get("_buffers", {}), state.get("_parameters", {})
    return buffers.get(name), parameters.get(name)


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
    held = held_by(probe, "w")
    return asked == ["_apply", "_load_from_state_dict"] and held[1] is probe.w


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
        for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
            getattr(functional, name)
        for name in ("all_to_all_single", "wait_tensor"):
            getattr(functional, name)


def _can_bind_apply() -> bool:
    apply = vars(torch.autograd.Function)["apply"]
    return callable(apply.__get__(None, torch.autograd.Function))


def _has_group_methods() -> bool:
    wanted = ("allreduce", "allgather", "reduce_scatter", "alltoall", "broadcast", "send")
    return not dist.is_available() or all(n in vars(dist.ProcessGroup) for n in wanted)


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
    """In a hook of a leaf, its node can be found, and followed."""
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


def _saves_attributes() -> bool:
    """Attributes of a tensor are saved, and those that are left out are not."""
    x = torch.zeros(1)
    x._placements_probe = x.kept = 1  # pyright: ignore[reportAttributeAccessIssue]
    saved = pickle.dumps(x)
    return b"kept" in saved and b"_placements_probe" not in saved


def _has_schemas() -> bool:
    """The overloads of an operator say the names, types and defaults of their arguments."""
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
    Use("torch._C._push_on_torch_function_stack", "begin checking", _a_mode_can_be_pushed),
    Use("torch.autograd.Function.apply", "find undeclared Functions", _can_bind_apply),
    Use("dist.ProcessGroup.allreduce, ...", "find raw collectives", _has_group_methods),
    Use(f"dist.distributed_c10d.{OBJECT_TO_TENSOR}", "find collectives of objects",
        _makes_tensors_of_objects),
    Use("nn.Module.register_buffer", "find state that is replaced",
        lambda: "register_buffer" in vars(nn.Module) and "__setattr__" in vars(nn.Module)),
    Use("torch._ops.OpOverload", "name an operator",
        lambda: op_name(torch.ops.aten.mm.default) == "aten::mm"),
    Use("torch._C._jit_get_schemas_for_operator", "bind arguments to their slots",
        lambda: _kind(str(_schemas("sum")[0].arguments[0].real_type)) == "Tensor"),
    Use("torch._C.ScriptFunction, torch._C.ScriptMethod", "see what scripts write",
        lambda: all("__call__" in vars(scripted) for scripted in SCRIPTED)),
    Use("torch._C._functorch.peek_interpreter_stack", "name a transform of torch.func",
        lambda: not in_transform()),
    Use("Tensor._version, Tensor._base", "find writes to memory", _counts_writes),
    Use("torch.UntypedStorage, one object for each memory", "note what was summed",
        _memory_keeps_attributes),
    Use("torch._C._current_graph_task_id", "tell backward from forward",
        lambda: not in_backward()),
    Use("torch._C._current_autograd_node, AccumulateGrad.variable, Node.register_prehook",
        "follow hooks that reduce a gradient", _finds_the_leaf),
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

DRAWING: tuple[Use, ...] = (
    Use("torch._C._jit_get_schemas_for_operator", "draw calls of every overload of an op",
        _has_schemas),
)  # fmt: skip

PARTS = {
    "checking": CHECKING, "modules": MODULES, "simulating": SIMULATING, "peers": PEERS,
    "drawing": DRAWING,
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


def unsupported(missing: list[str]) -> UnsupportedTorchError:
    return UnsupportedTorchError(
        f"torch {torch.__version__} is not supported. What this project needs of it is not "
        f"there or behaves differently: {'; '.join(missing)}. The tested versions are "
        f"{', '.join(TESTED)}: install one of them, for example "
        f"`pip install torch=={TESTED[-1]}`"
    )


def _probed(use: Use) -> tuple[Use, str]:
    try:
        works = use.probe() is not False
    except Exception as error:
        return use, f": {type(error).__name__}: {error}"
    return use, "" if works else ": it behaves differently"


def explicit_redistribution(**options: Any) -> Any:
    """A block in which DTensor raises where it would communicate by itself."""
    return _of("torch.distributed.tensor._utils.ExplicitRedistributionContext")(**options)


def fake_store() -> Any:
    """The store of a process group that sends nothing."""
    return _of("torch.testing._internal.distributed.fake_pg.FakeStore")()


# A slot of a signature: its name, its kind, its default (`NO_DEFAULT`: it must be given),
# and whether it is given by name only. The kinds are words of torch's schemas ("Tensor",
# "Scalar", "int", "int[]", "bool", "dtype", ...); "any" where torch does not say.
SlotData = tuple[str, str, Any, bool]
NO_DEFAULT: Any = object()
REST = "rest"  # the kind of a slot that takes all positional arguments that are left


def signatures(func: Any, name: str) -> tuple[bool, list[list[SlotData]]]:
    """Whether a torch function is a method in C, and all its overloads.

    A function written in Python has its own signature. A function in C has the schemas of
    the op of that name, and if there are none, the signature that torch's own tests of
    overriding use.
    """
    if isinstance(func, torch._ops.OpOverload):
        return False, [_slots(func._schema)]
    is_method = isinstance(func, _METHODS)
    plain = inspect.unwrap(func) if isinstance(func, FunctionType) else func
    if isinstance(plain, FunctionType):
        return False, [_python_slots(plain)]
    found = [_slots(schema) for schema in _schemas(name) if _is_called(schema)]
    found += _PARSED.get(name, [])
    if found:
        return is_method or isinstance(plain, _METHODS), found
    dummy = torch.overrides.get_testing_overrides().get(func)
    return False, [] if dummy is None else [_python_slots(dummy)]


_METHODS = (MethodDescriptorType, WrapperDescriptorType)

# What Python's own parser takes beside the schemas: x.to("cpu").
_PARSED: dict[str, list[list[SlotData]]] = {
    "to": [
        [("self", "Tensor", NO_DEFAULT, False), ("device", "device?", None, False),
         ("dtype", "dtype?", None, False), ("non_blocking", "bool", False, False),
         ("copy", "bool", False, False), ("memory_format", "memory_format?", None, True)],
    ],
}  # fmt: skip


def _schemas(name: str) -> list[Any]:
    qualified = name if "::" in name else f"aten::{name}"
    found = _C._jit_get_schemas_for_operator(qualified)
    base = qualified.removesuffix("_")
    return found or _C._jit_get_schemas_for_operator(base)


def _is_called(schema: Any) -> bool:
    """Whether Python may call this overload: others are for `out=` and for TorchScript."""
    arguments = schema.arguments
    if any(a.is_out or str(a.real_type).startswith("Dimname") for a in arguments):
        return False
    result = [str(r.real_type) for r in schema.returns]
    return schema.overload_name not in _SCRIPTED and any("Tensor" in r for r in result)


_SCRIPTED = ("t", "hacked_twin", "prim_Device", "prim_dtype", "prim_other", "a")


def _slots(schema: Any) -> list[SlotData]:
    return [
        (
            a.name,
            _kind(str(a.real_type)),
            a.default_value if a.has_default_value() else NO_DEFAULT,
            a.kwarg_only,
        )
        for a in schema.arguments
    ]


_KINDS = {"SymInt": "int", "ScalarType": "dtype", "Device": "device", "Layout": "layout",
          "MemoryFormat": "memory_format", "number": "Scalar"}  # fmt: skip


def _kind(text: str) -> str:
    """`SymInt[1]?` -> `int[]?`."""
    optional = "?" if text.endswith("?") or text.startswith("Optional[") else ""
    plain = text.removesuffix("?").removeprefix("Optional[")
    if optional and not text.endswith("?"):
        plain = plain.removesuffix("]")
    element, bracket, _ = plain.partition("[")
    if element == "List":
        element = plain[5:-1]
    element = element.partition("(")[0].removesuffix("?")
    if "Tensor" in element:
        element = "Tensor"
    return _KINDS.get(element, element) + ("[]" if bracket else "") + optional


def _python_slots(function: Any) -> list[SlotData]:
    found: list[SlotData] = []
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.VAR_KEYWORD:
            continue
        kind = REST if p.kind is p.VAR_POSITIONAL else "any"
        default = NO_DEFAULT if p.default is p.empty else p.default
        found.append((p.name, kind, default, p.kind is p.KEYWORD_ONLY))
    return found
