"""`typecheck()` by another engine: our words, under the checker of `spmd_types`.

The program is not changed. What it says with our calls, annotations and declarations is
said to the peer, which judges every op and runs its own collectives, forward and backward.
`peer_calls.py` says which call is which. What the peer cannot say is refused by name, or,
where the program itself says it in an annotation, taken from there and listed in `said`.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MappingProxyType
from typing import Annotated, Any, cast, get_args, get_origin

import spmd_types
import spmd_types.checker
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from placements.annotations.on import On, Variable
from placements.interop.fake_world import device_mesh_of, quiet
from placements.interop.peer_calls import moved, send_unequal_runs
from placements.interop.spmd_types import axis_type_to_peer, from_peer, named_spec
from placements.runtime.mesh import checked_mesh
from placements.runtime.state import checked_by
from placements.runtime.tags import declarations
from placements.types.axis import AxisType, Shard, TypesLike
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType
from placements.types.text import as_axis_type

_peer = cast(Any, spmd_types)
_checker = cast(Any, spmd_types.checker)


# Ops that are linear in their first operand, and that the peer refuses of a Partial: it
# counts an index as a summand, and takes a cast between floats for rounding alone.
_LINEAR = frozenset({"index_select", "gather", "to"})


class SecondEngine:
    """The checker of `spmd_types`, told of a program in our words.

    `said` has what the peer took from an annotation because it cannot infer it: sums that
    local mode takes for Varying, and in global mode the functions that ran as regions.
    """

    def __init__(
        self,
        *,
        local: bool = True,
        regions: Mapping[str, str | None] = MappingProxyType({}),
        strict: bool = True,
    ) -> None:
        self.local = local
        self.regions = regions
        self.mode = "strict" if strict else "permissive"
        self.said: set[str] = set()
        self._in_region = False
        self._mesh: Mesh | None = None
        self._on_mesh = ExitStack()

    @contextmanager
    def checking(self) -> Generator["SecondEngine"]:
        """Return the block in which this engine checks."""
        send_unequal_runs()
        with checked_by(self), quiet(), _checker.typecheck(self.mode, self.local):
            try:
                self.follow()
                with _Following(self):
                    yield self
            finally:
                self.leave_mesh()

    # The current mesh is ours; the peer has a stack of its own, whose top follows it.
    def follow(self) -> Mesh:
        mesh = checked_mesh()
        if mesh is not self._mesh:
            self.leave_mesh()
            if mesh.axes:
                made = mesh.device_mesh or device_mesh_of(mesh)
                self._on_mesh.enter_context(_peer.set_current_mesh(made))
            self._mesh = mesh
        return mesh

    def leave_mesh(self) -> None:
        self._on_mesh.close()
        self._mesh = None

    @property
    def _is_local(self) -> bool:
        return self.local or self._in_region

    # What our words mean.
    def moved(
        self, call: str, x: Tensor, axis: Any, src: Any, dst: Any, **more: Any
    ) -> Tensor:
        mesh = self.follow()
        if dst is None:
            raise ValueError(f"{call} needs dst=R or dst=I: the backward depends on it")
        types = [_from_front(as_axis_type(t), x) for t in (src, dst)]
        if call == "reinterpret" and any(isinstance(t, Shard) for t in types):
            return self._reinterpreted(x, axis, *types)
        return moved(mesh, call, x, axis, types, **more)

    def reads_summands(self, op: str, args: Any) -> bool:
        """Return whether an op is linear in a Partial, and the rest equal on ranks."""
        if not self._is_local or not _peer.has_local_type(args[0]):
            return False
        sums = _partial_axes(args[0])
        if not sums or not args[0].is_floating_point():
            return False
        for other in args[1:]:
            if isinstance(other, torch.dtype) and not other.is_floating_point:
                return False
            if isinstance(other, Tensor):
                known = _peer.get_local_type(other)
                if any(known.get(axis) is not _peer.R for axis in sums):
                    return False
        self.said.add(f"{op} of a Partial is Partial")
        return True

    def read_as_varying(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do an op on a Partial as on own values, and say that the result is summands."""
        sums = _partial_axes(args[0])
        own = args[0].view_as(args[0])
        for axis in sums:
            _peer.mutate_type(own, axis, src=_peer.P, dst=_peer.V)
        result = func(own, *args[1:], **kwargs)
        for axis in sums:
            group = _group_of(axis)
            result = _peer.reinterpret(result, group, src=_peer.V, dst=_peer.P)
        return result

    def _reinterpreted(self, x: Tensor, axis: str, src: AxisType, dst: AxisType) -> Tensor:
        if not self._is_local:
            raise ValueError(
                f"reinterpret({src!r} -> {dst!r}) on axis {axis!r}: in its global mode "
                "spmd_types has no Varying values, so this belongs in a region: name the "
                "@typed function around it in typecheck(regions=...)"
            )
        words = [
            _peer.V if isinstance(t, Shard) else axis_type_to_peer(t) for t in (src, dst)
        ]
        if words[0] is words[1]:
            return x
        return _peer.reinterpret(x, axis, src=words[0], dst=words[1], expert_mode=True)

    def declared(self, x: Tensor, types: TypesLike) -> Tensor:
        said = {axis: as_axis_type(t) for axis, t in types.items()}
        return self._said("assert_type", x, said)

    def _said(self, where: str, x: Tensor, types: Mapping[str, AxisType]) -> Tensor:
        """Tell the peer what a tensor is; return the tensor that is so."""
        mesh = self.follow()
        said: dict[str, Any] = {}
        cuts: dict[int, list[str]] = {}
        for axis, t in types.items():
            if axis not in mesh.axes:
                continue
            if isinstance(t, Shard):
                said[axis] = _peer.V
                if not self._is_local:
                    axis_type_to_peer(t)  # for its error
                    cuts.setdefault(t.dim % x.dim(), []).append(axis)
                continue
            said[axis] = axis_type_to_peer(t)
            known = _peer.maybe_get_axis_local_type(x, axis)
            if t.letter == "P" and known is _peer.V and self._is_local:
                self.said.add(f"{where} is Partial on {axis!r}")
                x = _peer.reinterpret(x, axis, src=_peer.V, dst=_peer.P)
        if not cuts:
            return _peer.assert_type(x, said) if said else x
        entries = [tuple(cuts[d]) if d in cuts else None for d in range(x.dim())]
        spec = _peer.PartitionSpec(*(e[0] if e and len(e) == 1 else e for e in entries))
        return _peer.assert_type(x, said, partition_spec=spec)

    def type_of(self, x: Tensor) -> TensorType | None:
        if not _peer.has_local_type(x):
            return None
        mesh = self.follow()
        names = {_peer.normalize_axis(axis): axis for axis in mesh.axes}
        found = _peer.get_local_type(x)
        # A constant has no type there, and goes with all.
        said = {axis: found.get(key, _peer.R) for key, axis in names.items()}
        spec = None if self._is_local else _peer.get_partition_spec(x)
        return from_peer(said, named_spec(spec, names), mesh)

    def presented(self, x: Tensor, mesh: Mesh) -> Tensor:
        self.follow()
        target = mesh.device_mesh or device_mesh_of(mesh)
        # The peer makes an alias, which its checker refuses of a Partial; a view it allows.
        return _peer.reinterpret_mesh(x.view_as(x), target, inplace=True)

    def numbered(self, rows: Tensor, x: Tensor, axes: frozenset[str]) -> Tensor:
        """Give numbers of rows of `x` a type: Varying where its rows are, and on `axes`."""
        known = self.type_of(x)
        if known is None:
            return rows
        own = {
            axis: _peer.V if t.letter in "SV" or axis in axes else _peer.R
            for axis, t in known.items()
        }
        return _peer.assert_type(rows, own)

    def stamped(self, module: nn.Module) -> None:
        mesh = self.follow()
        for name, types in declarations(module).items():
            tensor = getattr(module, name, None)
            if isinstance(tensor, Tensor) and not types.keys().isdisjoint(mesh.axes):
                self._said(f"{type(module).__name__}.{name}", tensor, _as_types(types))

    # Annotations.
    def called(self, fn: Callable[..., Any], bound: Any, hints: Mapping[str, Any]) -> Any:
        """Call a `@typed` function; what it says of arguments and results is said."""
        name, variables = fn.__qualname__, dict[str, Any]()
        arguments: dict[str, Any] = bound.arguments
        for key, value in arguments.items():
            hint = hints.get(key)
            arguments[key] = self._crossing(
                f"{name}({key})", value, hint, arguments, variables
            )
        rest = f"{name}() -> result", hints.get("return"), arguments, variables
        if self._is_local or name not in self.regions:
            return self._crossing(rest[0], fn(*bound.args, **bound.kwargs), *rest[1:])
        self.said.add(f"{name} is a region")
        with self._regional():
            result = self._crossing(rest[0], fn(*bound.args, **bound.kwargs), *rest[1:])
        like = self.regions[name]
        if like is not None:
            self._said(rest[0], result, self.type_of(arguments[like]) or {})
        return self._crossing(rest[0], result, *rest[1:])

    @contextmanager
    def _regional(self) -> Generator[None]:
        outside, self._in_region = self._in_region, True
        try:
            with _peer.local():
                yield
        finally:
            self._in_region = outside

    def _crossing(
        self, where: str, value: Any, hint: Any, arguments: Any, variables: dict[str, Any]
    ) -> Any:
        """Say of a tensor, or of each of a tuple, what its annotation says."""
        if isinstance(value, tuple) and get_origin(hint) is tuple:
            several, hints = cast(tuple[Any, ...], value), get_args(hint)
            hints = hints[:1] * len(several) if hints[-1:] == (Ellipsis,) else hints
            return tuple(
                self._crossing(f"{where}[{k}]", one, said, arguments, variables)
                for k, (one, said) in enumerate(zip(several, hints, strict=True))
            )
        if not isinstance(value, Tensor):
            return cast(Any, value)
        for on in _ons(hint):
            patterns = on.patterns(arguments)
            named = {a: t for a, t in patterns.items() if isinstance(t, Variable)}
            said = {a: t for a, t in patterns.items() if isinstance(t, AxisType)}
            value = self._said(where, value, said)
            for axis, variable in named.items():
                if axis in self.follow().axes:
                    found = _peer.maybe_get_axis_local_type(value, axis)
                    first = variables.setdefault(variable.name, found)
                    if found is not first and None not in (found, first):
                        raise _peer.SpmdTypeError(
                            f"{where} is {found} on axis {axis!r}, expected {first} "
                            f"({variable.name!r} is bound by an argument before it)"
                        )
        return value

    def region(
        self, fn: Callable[..., Any], args: Any, settings: Any, ins: Any, outs: Any
    ) -> Any:
        """Call a `region`: `local_map` in global mode."""
        for arg, types in zip(args, ins, strict=True):
            if isinstance(arg, Tensor) and types is not None:
                self._said("an argument of region", arg, _as_types(types))
        with self._regional():
            result = fn(*args, **settings)
        single = isinstance(result, Tensor)
        results: Any = (result,) if single else result
        wanted: Any = (outs,) if isinstance(outs, Mapping) else outs
        found: list[Any] = [
            self._said("a result of region", one, _as_types(types))
            for one, types in zip(results, wanted, strict=True)
        ]
        return found[0] if single else tuple[Any, ...](found)


class _Following(TorchFunctionMode):
    """Let the peer's mesh be ours before it sees an op."""

    def __init__(self, engine: SecondEngine) -> None:
        super().__init__()
        self.engine = engine

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.engine.follow()
        name = getattr(func, "__name__", "")
        if name in _LINEAR and self.engine.reads_summands(name, args):
            return self.engine.read_as_varying(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def typecheck(
    *,
    local: bool = True,
    regions: Mapping[str, str | None] = MappingProxyType({}),
    strict: bool = True,
) -> AbstractContextManager[SecondEngine]:
    """Check a program in our words by the checker of `spmd_types`, in the `with` block.

    In local mode a Shard is a Varying, and dims are not followed. `local=False` is its
    global mode; `regions` has the qualified names of the `@typed` functions, such as
    "GroupedExperts.forward", in which it cannot follow dims. Those run in local mode, and
    their annotations say what comes out, or the result is placed as the argument is whose
    name is given: {"GroupedExperts.forward": None, "routing_map": "expert_ids_TK"}. With
    `strict` an op with a tensor of no type is refused, as it is by our own `typecheck()`.
    The mesh is ours: `set_current_mesh`. What is to be differentiated must say that it is
    a sum: `assert_type(loss, {"dp": P})`.
    """
    return SecondEngine(local=local, regions=regions, strict=strict).checking()


def _partial_axes(x: Tensor) -> list[Any]:
    return [axis for axis, t in _peer.get_local_type(x).items() if t is _peer.P]


def _group_of(axis: Any) -> Any:
    """Return the name by which the current mesh of the peer knows an axis."""
    names = cast(Mapping[str, Any], _peer.current_mesh_names() or {})
    return next(name for name, one in names.items() if one == axis)


def _ons(hint: Any) -> list[On]:
    """Return the placements that an annotation has, also that of an optional tensor."""
    if get_origin(hint) is Annotated:
        return [m for m in get_args(hint)[1:] if isinstance(m, On)]
    return [on for option in get_args(hint) for on in _ons(option)]


def _as_types(types: TypesLike) -> dict[str, AxisType]:
    return {axis: as_axis_type(t) for axis, t in types.items()}


def _from_front(t: AxisType, x: Tensor) -> AxisType:
    return Shard(t.dim % x.dim(), t.extent) if isinstance(t, Shard) else t
