"""Fixes for a refused op: changes of its operands after which inference succeeds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from placements.inference.numbers import NUMBER
from placements.inference.retype import retyped
from placements.inference.terms import PIECEWISE, Operand, Refusal
from placements.inference.transitions import COSTS, TRANSITIONS, Transition, find
from placements.types.axis import BY_LETTER, AxisType, Shard
from placements.types.extents import Even
from placements.types.padding import Pads
from placements.types.tensor import TensorType

MOST = 3


@dataclass(frozen=True)
class Fix:
    """A change after which the types were inferred again and fit, and what it costs."""

    call: str
    forward: str
    backward: str
    # Whether it gives up what the types knew, so that a mistake may pass: it is for
    # programs that mean it.
    forgets: bool = False

    def __str__(self) -> str:
        return self.call


# Tried in this order; what keeps the meaning of the value comes first.
_CANDIDATES = [
    *(t for t in TRANSITIONS if t.call == "convert" and "V" not in (t.src, t.dst)),
    *(
        t
        for t in TRANSITIONS
        if t.call in ("all_reduce", "reduce_scatter") and t.dst != "V"
    ),
    *(t for t in TRANSITIONS if t.call == "all_gather" and t.src == "S"),
    *(t for t in TRANSITIONS if t.call == "reinterpret" and (t.src, t.dst) == ("S", "V")),
]

Infer = Callable[[Sequence[Operand]], object]


def fixes(
    infer: Infer,
    operands: Sequence[Operand],
    names: Sequence[str],
    refusal: Refusal,
    kept: int = 0,
) -> list[Fix]:
    """Return up to three changes of one operand, or of all that are alike, that type-check.

    The first `kept` operands are not to be changed: an in-place op writes them.
    """
    if refusal.pads is not None:
        return pad_fixes(infer, operands, names, refusal, kept)
    # Who takes rows of a piece may mean them, so one fix of three says that.
    means_own = refusal.reason == PIECEWISE
    mending: list[Fix] = []
    forgetting: list[Fix] = []  # they may silence the mistake, so they come last
    attempts = [(row, k) for row in _CANDIDATES for k in _choices(row, operands)]
    seen: set[Transition | None] = set()
    for row, changed in [*attempts, (None, ())]:
        if len(mending) == MOST and not means_own:
            break
        if row in seen or any(k < kept for k in changed):
            continue
        fix = _Attempt(infer, operands, names).run(refusal, row, changed)
        if fix is None or fix in mending or fix in forgetting:
            continue
        (forgetting if fix.forgets else mending).append(fix)
        seen.add(row)
    return [*mending[: MOST - means_own], *forgetting][:MOST]


def repeat_fix(
    infer: Infer, operands: Sequence[Operand], names: Sequence[str]
) -> list[Fix]:
    """Repeat the heads of operands that are cut like others and have fewer heads."""
    for small in operands:
        for dim in small.type.cut_dims:
            ndim = len(small.shape)
            sizes = sorted({o.shape[dim] for o in operands if len(o.shape) == ndim})
            times = sizes[-1] // (small.shape[dim] or 1)
            if len(sizes) != 2 or times < 2 or times * small.shape[dim] != sizes[-1]:
                continue
            changed = [
                _with_rows_repeated(o, dim, times)
                if len(o.shape) == ndim and o.shape[dim] == small.shape[dim]
                else o
                for o in operands
            ]
            try:
                infer(changed)
            except (Refusal, LookupError, ValueError, TypeError, ArithmeticError):
                continue
            texts = dict.fromkeys(
                f"{name}.repeat_interleave({times}, {dim})"
                for name, old, new in zip(names, operands, changed, strict=True)
                if old is not new
            )
            return [Fix("; ".join(texts), "nothing", "nothing")]
    return []


def _with_rows_repeated(x: Operand, dim: int, times: int) -> Operand:
    """Return an operand each of whose rows stands `times` times, where it was."""
    types: list[AxisType] = []
    for t in x.type.types:
        if isinstance(t, Shard) and t.dim == dim:
            if not isinstance(t.extent, Even):
                return x
            t = replace(t, extent=replace(t.extent, rows_in_all=t.extent.total * times))
        types.append(t)
    shape = (*x.shape[:dim], x.shape[dim] * times, *x.shape[dim + 1 :])
    repeated = TensorType(x.type.mesh, tuple(types), x.type.orders)
    return replace(x, type=repeated, shape=shape)


def cost(row: Transition, axis: str) -> tuple[str, str]:
    """Return what a transition costs forward and backward, in words."""
    forward, backward = COSTS[row.call, row.src, row.dst]
    on = f" over {axis}"
    return forward + on if forward else "nothing", backward + on if backward else "nothing"


def change(name: str, axis: str, actual: AxisType, expected: AxisType) -> Fix | None:
    """Return the one call that turns a type into another, if there is one."""
    row = find("redistribute", actual, expected)
    if row is None or (row.action == "recut" and repr(actual) == repr(expected)):
        return None
    text = call_text(row.call, name, axis, actual, expected)
    return Fix(text, *cost(row, axis))


def _choices(row: Transition, operands: Sequence[Operand]) -> list[tuple[int, ...]]:
    """Return each operand alone, then all those that the row could change."""
    able = tuple(
        k for k, o in enumerate(operands) if any(t.letter == row.src for t in o.type.types)
    )
    return [*((k,) for k in able), able] if len(able) > 1 else [able] * bool(able)


class _Attempt:
    """Change operands step by step until inference succeeds, or give up."""

    def __init__(
        self, infer: Infer, operands: Sequence[Operand], names: Sequence[str]
    ) -> None:
        self.infer = infer
        self.operands = list(operands)
        self.names = names
        # (operand, row, axis, type before, type after); an index that is said has no row
        self.steps: list[tuple[int, Transition | None, str, Operand, Operand]] = []

    def run(
        self, refusal: Refusal, row: Transition | None, changed: Sequence[int]
    ) -> Fix | None:
        for _ in range(2 * len(self.operands[0].type.types) + 1 if self.operands else 0):
            if not self._change(refusal, row, changed):
                return None
            try:
                self.infer(self.operands)
            except Refusal as again:
                refusal = again
                continue
            except (LookupError, ValueError, TypeError, ArithmeticError):
                return None
            return self._fix()
        return None

    def _change(
        self, refusal: Refusal, row: Transition | None, changed: Sequence[int]
    ) -> bool:
        if row is not None and refusal.axis is not None:
            moved = [self._move(k, row, refusal.axis) for k in changed]
            if all(moved):
                return True
        if refusal.index is None:
            return False
        # What an index counts is the last thing to say, when its shape is final.
        operand, domain = refusal.index
        k = operand.position
        old = self.operands[k]
        self.operands[k] = replace(old, type=old.type.with_index(domain))
        self.steps.append((k, None, "", old, self.operands[k]))
        return True

    def _move(self, k: int, row: Transition, axis: str) -> bool:
        found = self.operands[k].type
        shard = found.by_axis.get(axis)
        if isinstance(shard, Shard) and row.action in ("gather", "place"):
            # Cuts of one dim are undone from the innermost outward.
            order = found.cut_dims[shard.dim]
            inner = order[order.index(axis) + 1 :]
            if not all(self._move(k, row, a) for a in reversed(inner)):
                return False
        old = self.operands[k]
        new = _step(row, old, axis, self.operands)
        if new is None:
            return False
        self.operands[k] = new
        self.steps.append((k, row, axis, old, new))
        return True

    def _fix(self) -> Fix:
        texts, costs = list(self.names), list[tuple[str, str]]()
        forgets = False
        for k, row, axis, old, new in self.steps:
            if row is None:
                said = ", ".join(f"{a!r}: {t!r}" for a, t in new.type.items())
                index = new.type.index
                texts[k] = f"assert_type({texts[k]}, {{{said}}}, index={index!r})"
                forgets = True
                continue
            before, after = old.type.by_axis[axis], new.type.by_axis[axis]
            texts[k] = call_text(row.call, texts[k], axis, before, after)
            costs.append(cost(row, axis))
            forgets = forgets or row.call == "reinterpret"
        changed = [t for t, n in zip(texts, self.names, strict=True) if t != n]
        calls = dict.fromkeys(changed)  # one name may be two operands
        sides = [dict.fromkeys(side) for side in zip(*costs, strict=True)] or [{}, {}]
        forward, backward = (
            ", ".join(word for word in side if word != "nothing") or "nothing"
            for side in sides
        )
        return Fix("; ".join(calls), forward, backward, forgets)


def _step(
    row: Transition, x: Operand, axis: str, operands: Sequence[Operand]
) -> Operand | None:
    held = x.type.by_axis.get(axis)
    is_number = x.type.is_number or x.dtype == NUMBER  # collectives are for tensors
    if held is None or held.letter != row.src or is_number:
        return None
    for dst in _destinations(row, x, axis, operands):
        try:
            return retyped(row, x, axis, dst)
        except (Refusal, ValueError):
            continue
    return None


def _destinations(
    row: Transition, x: Operand, axis: str, operands: Sequence[Operand]
) -> list[AxisType]:
    if row.dst != "S":
        return [BY_LETTER[row.dst]]
    # Cut this operand as another one is cut.
    shards = [t for o in operands if isinstance(t := o.type.by_axis.get(axis), Shard)]
    dims = range(len(x.shape))
    return [replace(t, dim=d) for t in shards for d in dims] or [Shard(d) for d in dims]


# How many operands a fix may have to mask.
_MOST = 4


def pad_advice(refusal: Refusal) -> str:
    """Return what to do where no change of one operand helps."""
    if refusal.pads is None:
        return ""
    return (
        "mask first (torch.where(valid, x, 0)) what is summed; leave rows of padding out "
        "(x[valid]) before what looks along their dim; valid is the mask of these rows"
    )


def pad_fixes(
    infer: Infer,
    operands: Sequence[Operand],
    names: Sequence[str],
    refusal: Refusal,
    kept: int,
) -> list[Fix]:
    """Mask the rows of padding, or leave them out, if that makes the op right.

    The first `kept` operands are not to be changed: an in-place op writes them.
    """
    found = [
        _tried(change, infer, operands, names, refusal, kept) for change in (_masked, _left)
    ]
    return [fix for fix in found if fix is not None]


_Change = Callable[[Operand, Pads, str], tuple[Operand, str] | None]


def _tried(
    change: _Change,
    infer: Infer,
    operands: Sequence[Operand],
    names: Sequence[str],
    refusal: Refusal,
    kept: int,
) -> Fix | None:
    changed, texts = list(operands), list(names)
    for _ in range(_MOST):
        operand, pads = refusal.operand, refusal.pads
        if operand is None or pads is None or operand.position < kept:
            return None
        k = operand.position
        made = change(changed[k], pads, texts[k]) if pads in changed[k].type.pads else None
        if made is None:
            return None
        changed[k], texts[k] = made
        try:
            infer(changed)
        except Refusal as again:
            refusal = again
            continue
        except (LookupError, ValueError, TypeError):
            return None
        calls = [text for text, name in zip(texts, names, strict=True) if text != name]
        return Fix("; ".join(calls), "nothing", "nothing")
    return None


def _masked(x: Operand, pads: Pads, text: str) -> tuple[Operand, str] | None:
    """Return the fix that sets the rows of padding to zero."""
    if pads.holds == 0:
        return None
    zeros = replace(pads, holds=0)
    others = tuple(zeros if one == pads else one for one in x.type.pads)
    masked = f"torch.where({pads.mask(x.ndim)}, {text}, 0)"
    return replace(x, type=x.type.with_pads(others)), masked


def _left(x: Operand, pads: Pads, text: str) -> tuple[Operand, str] | None:
    """Return the fix that leaves rows of padding out of a tensor used with its mask."""
    if any(x.cut_axes(dim) for dim in pads.dims) or pads.dims[0] != 0:
        return None
    left = replace(x, type=x.type.with_pads(tuple(p for p in x.type.pads if p != pads)))
    first = pads.validity.first
    if first is not None and len(pads.dims) == 1:
        return replace(left, shape=(first, *x.shape[1:])), f"{text}[:{first}]"
    if pads.dims != tuple(range(len(pads.dims))) or len(x.type.pads) > 1:
        return None
    rows = replace(pads, dims=(0,)).mask(1)
    return replace(left, shape=(x.shape[0], *x.shape[len(pads.dims) :])), f"{text}[{rows}]"


def call_text(call: str, name: str, axis: str, src: AxisType, dst: AxisType) -> str:
    """Return the code of a collective or a cast: `all_reduce(x, 'tp', src=P, dst=R)`."""
    return f"{call}({name}, {axis!r}, src={src!r}, dst={dst!r})"
