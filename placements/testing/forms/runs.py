"""Runs a form's line on one device, and on every rank with checking on.

On axes where an operand is Varying, or where the line asks for the rank, the line has a
meaning on one device at each place.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

import placements
from placements._torch import unseen
from placements.annotations.declarations import assert_type, type_of
from placements.checker.mode import typecheck
from placements.runtime.mesh import set_current_mesh
from placements.runtime.state import shared_generator
from placements.testing.forms.form import WORDS, Form
from placements.testing.forms.operands import FormOperand, Place, places
from placements.types.axis import AxisType, Shard
from placements.types.index import Index
from placements.types.mesh import Mesh


@dataclass
class Run:
    """What a line did in one place: its outputs, and the leaves they came from."""

    outputs: list[Tensor] = field(default_factory=lambda: list[Tensor]())
    types: list[dict[str, AxisType] | None] = field(
        default_factory=lambda: list[dict[str, AxisType] | None]()
    )
    leaves: dict[str, Tensor] = field(default_factory=lambda: dict[str, Tensor]())
    error: Exception | None = None
    draws: bool = False

    def has_gradient(self, output: int) -> bool:
        """Torch marks whole numbers too, after a float was written into them."""
        x = self.outputs[output]
        return x.requires_grad and x.is_floating_point()


Runner = Callable[[Form, CodeType], "dict[Place, Run] | None"]


def source_of(form: Form) -> str:
    """Return the line as a statement that leaves what it made in `result`."""
    if form.overload == "subscript" and form.op == "__setitem__":
        return f"{form.line}\nresult = {form.target}"
    if any(
        f" {op}= " in form.line
        for op in ("+", "-", "*", "/", "//", "**", "%", "&", "|", "^")
    ):
        return f"{form.line}\nresult = {form.target}"
    return f"result = {form.line}"


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, tuple | list):
        every: list[Any] = list(result)  # pyright: ignore[reportUnknownArgumentType]
        return [x for item in every for x in _tensors(item)]
    return []


def _prepared(
    form: Form, held: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Leaves that want gradients, and copies that a line may write to."""
    leaves: dict[str, Tensor] = {}
    given: dict[str, Tensor] = {}
    for name, value in held.items():
        if value.is_floating_point() and form.operands[name].takes_gradient:
            leaves[name] = value.detach().clone().requires_grad_()
            given[name] = leaves[name].clone()
        else:
            given[name] = value.clone()
    return leaves, given


def _outputs(form: Form, names: Mapping[str, Any]) -> list[Tensor]:
    """What the line returns, and what it wrote, such as statistics of a norm."""
    outputs = _tensors(names["result"])
    written = [
        names[name] for name in form.operands if names[name]._version or name in form.kept
    ]
    for x in [names.get(form.target), *written]:
        if isinstance(x, Tensor) and all(x is not other for other in outputs):
            outputs.append(x)
    return outputs


def run_on_one_device(form: Form, code: CodeType) -> dict[Place, Run] | None:
    """Run the line on the global values, at each place that matters; None: it raises.

    Where it draws numbers, all places draw the same.
    """
    made: dict[Place, Run] = {}
    before = torch.get_rng_state()
    for where in places(form.sizes, form.apart):
        held = {name: x.value_at(where) for name, x in form.operands.items()}
        leaves, given = _prepared(form, held)
        at = dict(where)
        mesh = SimpleNamespace(coordinate=at)
        names = {**WORDS, **given, "axis_rank": at.get, "current_mesh": lambda m=mesh: m}
        torch.set_rng_state(before)
        try:
            exec(code, names)
            outputs = _outputs(form, names)
        except Exception:
            return None
        if not outputs or any(x.layout is not torch.strided for x in outputs):
            return None
        draws = "empty" in form.op or not torch.equal(before, torch.get_rng_state())
        made[where] = Run(outputs, [], leaves, draws=draws)
    return made


def is_undetermined(form: Form, meant: Mapping[Place, Run]) -> bool:
    """Return whether torch itself gives no definite result on one device.

    Circular padding by a negative number leaves memory unwritten, and the gradient of a QR
    decomposition needs independent columns. The largest of a window that has nothing but
    padding is an element of another row, by an index that is out of range.
    """
    if "max_pool" in form.op:
        outputs = [x for run in meant.values() for x in run.outputs]
        return any(bool(x.isneginf().any()) for x in outputs if x.is_floating_point())
    if form.op == "pad":
        return "circular" in form.line and "-" in form.line
    if form.op not in ("qr", "linalg_qr"):
        return False
    values = [v for x in form.operands.values() for v in x.values.values() if v.dim() > 1]
    rank_of = cast(Any, torch.linalg).matrix_rank
    ranks: list[Tensor] = [rank_of(v.double()) for v in values]
    full = [min(v.shape[-2:]) for v in values]
    return any(bool((r < n).any()) for r, n in zip(ranks, full, strict=True))


def counted_apart(meant: Mapping[Place, Run]) -> set[str]:
    """Return the axes along which one device has other numbers of results."""
    found: set[str] = set()
    for where, run in meant.items():
        for there, other in meant.items():
            differing = [
                a
                for (a, at), (_, other_at) in zip(where, there, strict=True)
                if at != other_at
            ]
            if len(differing) == 1 and len(run.outputs) != len(other.outputs):
                found.add(differing[0])
    return found


def settings_of_pieces(form: Form) -> set[str]:
    """Return the axes on which a size that is used as a number is that of a piece."""
    axes: set[str] = set()
    for text in form.settings:
        named = set(re.findall(r"\b\w+\b", text))
        read = {name: x for name, x in form.operands.items() if name in named}
        for rank in places(form.sizes, list(form.sizes)):
            whole = eval(text, {**WORDS, **{n: x.value_at(rank) for n, x in read.items()}})
            for axis in form.sizes:
                pieces = {n: _cut_over(axis, x, rank) for n, x in read.items()}
                if eval(text, {**WORDS, **pieces}) != whole:
                    axes.add(axis)
    return axes


def _cut_over(axis: str, x: FormOperand, rank: Place) -> Tensor:
    """Return the whole value, as long as the piece in the dim that this axis cuts."""
    whole, t = x.value_at(rank), x.types.get(axis)
    if not isinstance(t, Shard):
        return whole
    return whole.narrow(t.dim, 0, x.locals[rank].shape[t.dim])


def run_on_ranks(form: Form, code: CodeType) -> dict[Place, Run] | None:
    """Run the line, checked, on every rank; None if an operand cannot be declared."""
    made: dict[Place, Run] = {}
    before = torch.get_rng_state()
    with typecheck():
        for rank in places(form.sizes, list(form.sizes)):
            held = {name: x.locals[rank] for name, x in form.operands.items()}
            with unseen():
                leaves, given = _prepared(form, held)
            if form.shared:
                torch.set_rng_state(before)
            mesh = _mesh(tuple(form.sizes.items()), rank)
            with set_current_mesh(mesh), shared_generator(*form.shared):
                try:
                    for name, x in form.operands.items():
                        assert_type(given[name], x.types, index=x.index)
                except ValueError:
                    return None
                names = {
                    **WORDS, **given, "axis_rank": placements.axis_rank,
                    "current_mesh": placements.current_mesh,
                }  # fmt: skip
                run = made[rank] = Run(leaves=leaves)
                try:
                    exec(code, names)
                    outputs = _outputs(form, names)
                    run.types = [_said(x) for x in outputs]
                    run.outputs = [_counted_over_all(x, dict(rank)) for x in outputs]
                except Exception as error:
                    run.error = error
    return made


def _said(x: Tensor) -> dict[str, AxisType] | None:
    known = type_of(x)
    return None if known is None else dict(known)


def _counted_over_all(x: Tensor, rank: Mapping[str, int]) -> Tensor:
    """Numbers of own rows as one device numbers these rows: that is what they mean."""
    known = type_of(x)
    domain = known.index if known is not None else None
    if known is None or not isinstance(domain, Index):
        return x
    with unseen():
        for axis, extent in reversed(domain.cuts):
            if isinstance(known[axis], Shard):
                x = extent.to_global(x, rank[axis])
    return x


_meshes: dict[tuple[tuple[tuple[str, int], ...], Place], Mesh] = {}


def _mesh(sizes: tuple[tuple[str, int], ...], rank: Place) -> Mesh:
    key = (sizes, rank)
    if key not in _meshes:
        _meshes[key] = Mesh(dict(sizes), dict(rank))
    return _meshes[key]
