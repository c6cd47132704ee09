"""Declare the type of a tensor, ask for it, and trust an opaque function's types."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from placements import tags
from placements.callsite import caller, name_of
from placements.describe import checked_mesh, described, type_or_error
from placements.effects import unwritten
from placements.errors import ArgumentError, PlacementError, mismatch
from placements.index import Index
from placements.mesh import unknown_axis
from placements.padding import declare_padding, padded_at
from placements.state import current, observer
from placements.tensor_type import TensorType, declared
from placements.torch_private import unseen
from placements.types import Shard, TypesLike, as_axis_type

T = TypeVar("T")


def assert_type(
    x: Tensor,
    types: TypesLike,
    *,
    index: Index | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Declare an untyped tensor, check a typed one; returns `x`.

    With checking off it does nothing. `index` says what an integer tensor indexes.
    `valid` is a mask over the first dims of `x`: where it is False are rows of padding.
    Raises PlacementError if the tensor has another type, ValueError if the declaration
    does not fit the mesh or the tensor.
    """
    if current.mode is None:
        return x
    with unseen():
        known = tags.get(x)
        if known is None or known.fresh is not None:
            tags.put(x, declared(checked_mesh(), types, tuple(x.shape), index))
        else:
            _check(x, known, types)
            if index is not None:
                tags.put(x, known.with_index(index))
        if valid is not None:
            tags.put(x, declare_padding(x, type_or_error(x, "assert_type"), valid))
        _observe("assert_type", None, x)
    return x


def _observe(where: str, name: str | None, x: Tensor) -> None:
    watcher = observer()
    if watcher is not None:
        watcher.crossing(where, name, x, tags.get(x))


def _check(x: Tensor, known: TensorType, types: TypesLike) -> None:
    wanted = declared(known.mesh, types, tuple(x.shape))
    for axis, expected in wanted.items():
        given = as_axis_type(types[axis])
        if isinstance(given, Shard) and isinstance(expected, Shard):
            # A declaration without an extent leaves it open.
            expected = Shard(expected.dim, given.extent and expected.extent)
        if known[axis] != expected:
            raise mismatch(
                f"assert_type at {caller()}", name_of(x) or "x", axis, repr(expected),
                repr(known[axis]), operands=[described(x, known)],
            )  # fmt: skip


def type_of(x: Tensor) -> TensorType | None:
    """The tensor's type, a mapping axis -> type; None if it has none."""
    with unseen():
        return tags.get(x)


def declare(module: nn.Module, types: Mapping[str, TypesLike]) -> None:
    """Declare the types of a module's parameters and buffers, by name.

    The declaration belongs to the module, so it survives what makes new parameters:
    deepcopy, `to_empty`, `load_state_dict(assign=True)`, FSDP2. The tensors are stamped
    each time the module is called under `typecheck()`.
    """
    for name, given in types.items():
        owner_name, _, leaf = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        if getattr(owner, leaf, None) is None:
            known = [n for n, _ in [*module.named_parameters(), *module.named_buffers()]]
            raise ValueError(f"no parameter or buffer {name!r}; there are {known}")
        _check_same(name, getattr(owner, leaf), given)
        if not declarations(owner):
            _called(module, owner_name).register_forward_pre_hook(_stamp_before)
        remember(owner, leaf, given)


def _check_same(name: str, tensor: Tensor, given: TypesLike) -> None:
    """A tensor that was said to be something else is not declared anew."""
    known = tags.get(tensor)
    if current.mode is None or known is None or known.fresh is not None:
        return
    with unseen():
        wanted = declared(checked_mesh(), given, tuple(tensor.shape))
    if known.mesh == wanted.mesh and known.types != wanted.types:
        axis = next(a for a in wanted if wanted[a] != known[a])
        raise mismatch(
            f"declare at {caller()}", name, axis, repr(wanted[axis]), repr(known[axis]),
            rule="it was said to be another type before",
            operands=[described(tensor, known)],
        )  # fmt: skip


# Modules that are never called: whoever holds them uses their parameters.
_LISTS = (nn.ParameterList, nn.ParameterDict)


def _called(module: nn.Module, path: str) -> nn.Module:
    """The module of this name; of a list of parameters, the module that holds it."""
    owner = module.get_submodule(path)
    while path and isinstance(owner, _LISTS):
        path = path.rpartition(".")[0]
        owner = module.get_submodule(path)
    return owner


_DECLARED = "_placements_declared"


def declarations(module: nn.Module) -> Mapping[str, TypesLike]:
    """What `declare` said of this module's own parameters and buffers."""
    return module.__dict__.get(_DECLARED, {})


def remember(module: nn.Module, name: str, types: TypesLike) -> None:
    """Keep a declaration with the module; whoever calls the module stamps."""
    module.__dict__.setdefault(_DECLARED, {})[name] = dict(types)


def stamp(module: nn.Module) -> None:
    """Give the module's own parameters and buffers the types declared for them."""
    with unseen():
        _stamp_own(module)
        for child in module.children():
            if isinstance(child, _LISTS):
                _stamp_own(child)


def _stamp_own(module: nn.Module) -> None:
    for name, types in declarations(module).items():
        tensor = getattr(module, name)
        tags.put(tensor, declared(checked_mesh(), types, tuple(tensor.shape)))
        watcher = observer()
        if watcher is not None:
            watcher.stamped(module, name, tensor)


def _stamp_before(module: nn.Module, args: Any) -> None:
    if current.mode is not None:
        stamp(module)


def region(
    fn: Callable[..., T],
    *,
    ins: Sequence[TypesLike | None],
    outs: TypesLike | Sequence[TypesLike],
    grads: Sequence[TypesLike | None],
) -> Callable[..., T]:
    """Declared types around an opaque function.

    `ins` and `grads` give, for each positional argument, its type and the type of its
    gradient (None for what is not a tensor): neither has a default, and the gradient's
    type must be the dual of the argument's. Inside, ops that are known are checked with
    the declared types; what is not known gives untyped results. At the end a typed
    result must have the type in `outs`; an untyped one gets it. The arguments are not
    to be written.
    """
    if len(ins) != len(grads):
        raise ValueError(f"region: {len(ins)} ins but {len(grads)} grads")

    def call(*args: Any) -> T:
        if current.mode is None:
            return fn(*args)
        if len(args) != len(ins):
            raise ArgumentError(f"region: {len(ins)} types declared, {len(args)} arguments")
        with unseen():
            for arg, given, grad in zip(args, ins, grads, strict=True):
                _check_boundary(arg, given, grad)
        with unwritten("region", args), current.mode.trusting():
            result = fn(*args)
        with unseen():
            _check_results(result, outs)
        return result

    return call


def _check_boundary(arg: Any, given: TypesLike | None, grad: TypesLike | None) -> None:
    if not isinstance(arg, Tensor):
        return
    if given is None or grad is None:
        raise ArgumentError(
            f"region: {described(arg)} is a tensor, so ins and grads must say its types"
        )
    known = type_or_error(arg, "region")
    if known.pads:
        raise padded_at("region", arg, known)
    _check(arg, known, given)
    wrong = unknown_axis(known.mesh, grad)
    if wrong is not None:
        raise ArgumentError(f"region: grads {wrong}")
    _observe("region", None, arg)
    for axis, t in known.dual().items():
        said = as_axis_type(grad[axis]) if axis in grad else None
        if said != t:
            raise mismatch(
                f"region at {caller()}", name_of(arg) or "argument", axis, repr(t),
                repr(said), rule="the gradient of a value has the dual of its type: a "
                "gradient that is already complete belongs to an Invariant value",
                operands=[described(arg, known)],
            )  # fmt: skip


def _check_results(result: Any, outs: Any) -> None:
    results = cast(Any, result if isinstance(result, tuple) else (result,))
    wanted: Any = (outs,) if isinstance(outs, Mapping) else tuple(outs)
    if len(results) != len(wanted):
        raise PlacementError(
            f"region: {len(results)} results, but outs declares {len(wanted)}",
            where="region",
        )
    for tensor, types in zip(results, wanted, strict=True):
        if tags.get(tensor) is None:
            tags.put(tensor, declared(checked_mesh(), types, tuple(tensor.shape)))
        else:
            _check(tensor, type_or_error(tensor, "region"), types)
        _observe("region", "result", tensor)
