"""Every mutant, as data: the table, the row, what is flipped, and the laws to try.

One mutant makes one change. Rows are taken from the tables themselves, so a new row has
its mutants without a change here; what is written out are changes of formulas.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from placements import autograd_rules, duals, extents, infer, moves, ops, rules, transitions
from placements.flows import random
from placements.infer import Label
from placements.ops import OPS, ROWS, SUM, Op, Row
from placements.rules import DRAWS, LINEAR, MULTILINEAR, NONLINEAR, RULES, Linearity, Rule
from placements.testing.cases import call_names
from placements.transitions import TRANSITIONS, Transition
from placements.types import BY_LETTER
from tests.mutants.killers import Killer
from tests.mutants.patches import Patches

LETTERS = "RIVSP"


@dataclass(frozen=True)
class Mutant:
    """One change of one row, and the laws that should notice."""

    table: str
    row: str
    change: str
    apply: Callable[[Patches], None]
    killers: tuple[Killer, ...]

    @property
    def name(self) -> str:
        return f"{self.table} | {self.row} | {self.change}"


def mutants() -> list[Mutant]:
    """All of them, table by table."""
    makers = (
        _rules, _dims, _draws, _duals, _losses, _transitions, _backwards, _extents,
        _linearities, _along,
    )  # fmt: skip
    found = [mutant for make in makers for mutant in make()]
    assert len({m.name for m in found}) == len(found), "two mutants of one name"
    return found


def _sound(*names: str) -> tuple[Killer, ...]:
    return tuple(("sound", name) for name in names)


# rules.RULES, rules.PARTIAL_PLUS_NUMBER

BY_LINEARITY: dict[Linearity | None, tuple[str, ...]] = {
    LINEAR: ("add", "where", "cumsum"),
    MULTILINEAR: ("mul", "matmul"),
    NONLINEAR: ("exp", "maximum", "where"),
    None: ("neg", "mul", "exp", "add"),
}


def _replaced_rule(place: int, new: Rule | None, p: Patches) -> None:
    rows = (*RULES[:place], *([] if new is None else [new]), *RULES[place + 1 :])
    p.everywhere(RULES, rows)


def _flipped(rule: Rule) -> Iterator[Rule]:
    """The row with every other result, or with a refusal."""
    for gives in (*LETTERS, None):
        if gives != rule.gives:
            kind = "unsound" if gives is None else "sound"
            yield replace(rule, gives=gives, kind=kind)


def _rules() -> Iterator[Mutant]:
    for place, rule in enumerate(RULES):
        linearity = rule.linearity.value if rule.linearity else "any"
        row = f"{place} {linearity}, has {rule.has or '-'}, only {rule.only}"
        killers = (("cells", ""), *_sound(*BY_LINEARITY[rule.linearity]))
        for new in _flipped(rule):
            change = f"{rule.gives or 'refused'} -> {new.gives or 'refused'}"
            yield Mutant("rules", row, change, partial(_replaced_rule, place, new), killers)
        yield Mutant("rules", row, "dropped", partial(_replaced_rule, place, None), killers)
        if rule.at_most_partials is not None:
            for count in (0, 2):
                new = replace(rule, at_most_partials=count)
                yield Mutant(
                    "rules", row, f"at most {count} sums",
                    partial(_replaced_rule, place, new), killers,
                )  # fmt: skip
    old = rules.PARTIAL_PLUS_NUMBER
    for gives in LETTERS:
        new = replace(old, gives=gives, kind="sound")
        yield Mutant(
            "rules", "PARTIAL_PLUS_NUMBER", f"refused -> {gives}",
            lambda p, new=new: p.everywhere(old, new), _sound("masked_fill 6", "add 6"),
        )  # fmt: skip


# infer: the checks behind rules.DIM_REASONS

# function, check, what it says, what the mutant says, ops that meet it
DIMS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    ("_agree_on_dim", "other dim: not checked",
     "if other_dim != dim:", "if False:", ("add", "mul", "matmul", "outer")),
    ("_agree_on_dim", "other extent: not checked",
     "if other_extent != extent:", "if False:", ("add", "mul", "where", "matmul")),
    ("_agree_on_dim", "whole operand: not checked",
     "if id(term) in cut or", "if True or id(term) in cut or", ("add", "mul", "where")),
    ("_agree_on_dim", "the result is cut along the next dim",
     "return Shard(dim, extent)", "return Shard(dim + 1, extent)", ("add", "neg")),
    ("_contract", "other extent: not checked",
     "if other != extent:", "if False:", ("matmul", "einsum", "linear")),
    ("_contract", "half contraction: not checked",
     "if id(term) in cut or", "if True or id(term) in cut or", ("matmul", "einsum")),
    ("_contract", "with a Varying operand: a sum",
     'return "V"', 'return "P"', ("matmul", "einsum", "mse_loss")),
    ("_contract", "a sum -> the rank's own value",
     'return "P"', 'return "V"', ("matmul", "sum", "einsum")),
    ("_contract", "a sum -> equal on all ranks",
     'return "P"', 'return "R"', ("matmul", "sum", "einsum")),
    ("_in_order", "other order: not checked",
     "if len(orders) > 1:", "if False:", ("add", "mul")),
    ("_join_axis", "Mixed is not refused",
     "if isinstance(label, Mixed):", "if False:", ("cumsum", "mean", "amax", "softmax")),
    ("_join_axis", "Scattered keeps its letter",
     'letter = "V"', "pass", ("masked_select", "nonzero", "argwhere")),
    ("_joined", "an integer R mixes with nothing",
     'if letter in "RI" and not term', "if False and not term",
     ("where", "gather", "embedding")),
)  # fmt: skip


def _dims() -> Iterator[Mutant]:
    for function, change, old, new, names in DIMS:
        yield Mutant(
            "dims", f"infer.{function}", change,
            partial(Patches.text, owner=infer, name=function, old=old, new=new),
            (*_sound(*names), ("programs", "")),
        )  # fmt: skip


# rules.DRAWS

RANDOM = ("dropout", "bernoulli", "multinomial", "normal", "rand_like", "uniform_")


def _draws() -> Iterator[Mutant]:
    for row in DRAWS:
        for gives in (*LETTERS, None):
            if gives == row.gives:
                continue
            new = replace(row, gives=gives)
            key = row.letter, row.shared
            yield Mutant(
                "draws", f"{row.letter}, {'shared' if row.shared else 'own'} generator",
                f"{row.gives or 'refused'} -> {gives or 'refused'}",
                lambda p, new=new, key=key: p.item(random._DRAW, key, new),
                (("draws", ""), *_sound(*RANDOM)),
            )  # fmt: skip


# duals.DUALS


def _all_moves() -> tuple[Killer, ...]:
    return tuple(("moves", str(k)) for k in range(len(TRANSITIONS)))


def _duals() -> Iterator[Mutant]:
    killers = (("duality", ""), *_sound("mul", "sum"), ("programs", ""))
    for letter, old in duals.DUALS.items():
        for new in BY_LETTER.values():
            if new != old:
                yield Mutant(
                    "duals", letter, f"{old.letter} -> {new.letter}",
                    lambda p, k=letter, new=new: p.item(duals.DUALS, k, new), killers,
                )  # fmt: skip
    for letter in "RIVP":
        yield Mutant(
            "duals", "S", f"S -> {letter}",
            partial(
                Patches.text, owner=duals, name="dual",
                old="return axis_type", new=f"return {letter}",
            ),
            killers,
        )  # fmt: skip


# autograd_rules.LOSSES


def _losses() -> Iterator[Mutant]:
    refusal = ("a mutant", "convert", "I")
    table = autograd_rules.LOSSES
    for letter, verdict in table.items():
        new = refusal if verdict is None else None
        yield Mutant(
            "losses", letter, "accepted -> refused" if new else "refused -> accepted",
            lambda p, letter=letter, new=new: p.item(table, letter, new),
            (("losses", ""),),
        )  # fmt: skip


# transitions.TRANSITIONS

# Actions that take and give tensors of the same shapes.
ALIKE = (
    {"same", "first only", "sum"},
    {"gather", "place"},
    {"cut", "sum and cut"},
    {"stack", "place row"},
    {"unbind", "sum and unbind"},
)


def _other_actions(action: str) -> list[str]:
    return sorted({a for group in ALIKE if action in group for a in group} - {action})


def _replaced_row(place: int, new: Transition, p: Patches) -> None:
    p.everywhere(TRANSITIONS, (*TRANSITIONS[:place], new, *TRANSITIONS[place + 1 :]))
    p.item(transitions._BY_CALL, (new.call, new.src, new.dst), new)
    if new.call != "reinterpret":
        p.item(transitions._MEANING_KEPT, (new.src, new.dst), new)


def _transitions() -> Iterator[Mutant]:
    for place, row in enumerate(TRANSITIONS):
        killers = (("moves", str(place)), ("duality", ""), *_all_moves())
        for action in _other_actions(row.action):
            new = replace(row, action=action)
            yield Mutant(
                "transitions", f"{row.call} {row.src} -> {row.dst}",
                f"{row.action} -> {action}", partial(_replaced_row, place, new), killers,
            )  # fmt: skip


def _other_backward(row: Transition, action: str, p: Patches) -> None:
    original = transitions.dual_transition

    def dual_transition(given: Transition) -> Transition:
        found = original(given)
        return replace(found, action=action) if given == row else found

    p.everywhere(original, dual_transition)


# function or class, name, change, what it says, what the mutant says, rows that meet it
MOVES: tuple[tuple[Any, str, str, str, str, str], ...] = (
    (moves.Move, "dual", "sends are not exchanged",
     "sends=self.receives,", "sends=self.sends,", "V -> V"),
    (moves.Move, "dual", "receives are not exchanged",
     "receives=self.sends,", "receives=self.receives,", "V -> V"),
    (moves.Move, "dual", "the source's cut is kept",
     "src_cut=self.dst_cut,", "src_cut=self.src_cut,", "S -> S"),
    (moves.Move, "dual", "the target's cut is kept",
     "dst_cut=self.src_cut,", "dst_cut=self.dst_cut,", "S -> S"),
    (moves, "_first_only", "on every rank",
     "move.line.rank == 0", "move.line.rank >= 0", "R -> P"),
    (moves, "_unbind", "the first row",
     "move.line.rank", "0", "R -> V"),
    (moves, "_cut", "the first piece",
     "move.line.rank", "0", "R -> S"),
    (moves, "_place_row", "in the first row",
     "rank == move.line.rank", "rank == 0", "V -> P"),
    (moves.transport, "sum_rows", "an average",
     "reduced.view(x.shape[1:])", "reduced.view(x.shape[1:]) / line.size", "P -> S"),
    (moves.transport, "sum_over", "without the sum",
     'functional.all_reduce(x.contiguous(), "sum", line.group_name)', "x.clone()", "P -> R"),
    (moves.transport, "exchange_rows", "sends and receives exchanged",
     "list(receives), list(sends)", "list(sends), list(receives)", "V -> V"),
    (moves.transport, "gather_pieces", "pad rows are kept",
     "p.narrow(dim, 0, s) for p, s", "p for p, s", "S -> R"),
    (moves.transport, "sum_and_cut", "pad rows are kept",
     "mine.narrow(dim, 0, extent.local_size(line.rank))", "mine", "P -> S"),
    (moves.transport, "place_piece", "at the first rank's place",
     "rank == line.rank", "rank == 0", "S -> P"),
    (moves.transport, "recut", "pad rows are kept",
     "block.narrow(new_dim, 0, mine).narrow(old_dim, 0, size)", "block", "S -> S"),
)  # fmt: skip


def _backwards() -> Iterator[Mutant]:
    for place, row in enumerate(TRANSITIONS):
        back = transitions.dual_transition(row)
        for action in _other_actions(back.action):
            yield Mutant(
                "backward", f"{row.call} {row.src} -> {row.dst}",
                f"{back.action} -> {action}", partial(_other_backward, row, action),
                (("moves", str(place)), ("duality", "")),
            )  # fmt: skip
    for owner, name, change, old, new, pair in MOVES:
        rows = [k for k, t in enumerate(TRANSITIONS) if f"{t.src} -> {t.dst}" == pair]
        yield Mutant(
            "backward", f"{owner.__name__.rpartition('.')[2]}.{name}", change,
            partial(Patches.text, owner=owner, name=name, old=old, new=new),
            (*(("moves", str(k)) for k in rows), *_all_moves()),
        )  # fmt: skip


# extents: class, method, change, what it says, what the mutant says
FORMULAS: tuple[tuple[type, str, str, str, str], ...] = (
    (extents.Even, "local_size", "one more", "self.rows_in_all // self.bound_ranks",
     "self.rows_in_all // self.bound_ranks + 1"),
    (extents.Even, "offset", "one more", "rank * self.local_size(rank)",
     "rank * self.local_size(rank) + 1"),
    (extents.Even, "to_global", "one more", "index + self.offset(rank)",
     "index + self.offset(rank) + 1"),
    (extents.Even, "to_global", "no offset", "index + self.offset(rank)", "index"),
    (extents.Even, "to_local", "one more", "row % size", "row % size + 1"),
    (extents.Even, "to_local", "another rank", "row // size", "(row + 1) // size"),
    (extents.Even, "scaled", "not scaled", "self.rows_in_all * factor", "self.rows_in_all"),
    (extents.Padded, "stride", "rounded down", "-(-self.rows_in_all // self.bound_ranks)",
     "self.rows_in_all // self.bound_ranks"),
    (extents.Padded, "local_size", "the padded length",
     "min(max(self.rows_in_all - rank * self.stride, 0), self.stride)", "self.stride"),
    (extents.Padded, "local_size", "below zero", "max(self.rows_in_all - rank * self.stride, 0)",
     "(self.rows_in_all - rank * self.stride)"),
    (extents.Padded, "offset", "beyond the end",
     "min(rank * self.stride, self.rows_in_all)", "rank * self.stride"),
    (extents.Padded, "offset", "one more",
     "min(rank * self.stride, self.rows_in_all)",
     "min(rank * self.stride + 1, self.rows_in_all)"),
    (extents.Padded, "to_global", "the rank's own length",
     "rank * self.stride", "rank * self.local_size(rank)"),
    (extents.Padded, "to_local", "one more", "row % self.stride", "row % self.stride + 1"),
    (extents.Padded, "scaled", "not scaled", "size * factor", "size"),
    (extents.Padded, "scaled", "padded anew",
     "Ragged(*(size * factor for size in self.sizes)).canonical()",
     "replace(self, rows_in_all=self.rows_in_all * factor)"),
    (extents.Ragged, "local_size", "the first rank's", "self._sizes[rank]", "self._sizes[0]"),
    (extents.Ragged, "local_size", "one more", "self._sizes[rank]", "self._sizes[rank] + 1"),
    (extents.Ragged, "offset", "the next rank's", "self._starts[rank]",
     "self._starts[rank + 1]"),
    (extents.Ragged, "to_global", "the next rank's", "self._starts[rank]",
     "self._starts[rank + 1]"),
    (extents.Ragged, "to_global", "as if even", "self._starts[rank]",
     "rank * (self.total // len(self._sizes))"),
    (extents.Ragged, "to_local", "ends belong to the rank before (int)",
     "searchsorted(starts, row, right=True)", "searchsorted(starts, row)"),
    (extents.Ragged, "to_local", "ends belong to the rank before (tensor)",
     "row, right=True)\n        return rank", "row)\n        return rank"),
    (extents.Ragged, "scaled", "not scaled", "size * factor", "size"),
    (extents.Ragged, "canonical", "always even", "if self.key(None)[0] == named.__name__:",
     "if True:"),
    (extents.Folded, "local_size", "one block", "self.outer * self.inner", "self.inner"),
    (extents.Folded, "offset", "one more", "self.inner.offset(rank)",
     "self.inner.offset(rank) + 1"),
    (extents.Folded, "to_global", "the padded length", "self.inner.local_size(rank)",
     "max(self.inner.sizes)"),
    (extents.Folded, "to_global", "one block", "block * self.inner.total + ", ""),
    (extents.Folded, "to_global", "blocks of local length", "block * self.inner.total",
     "block * length"),
    (extents.Folded, "to_local", "one block (int)",
     "rank, block * self.inner.local_size(rank) + index", "rank, index"),
    (extents.Folded, "to_local", "the first rank's length (int)",
     "self.inner.local_size(rank)", "self.inner.local_size(0)"),
    (extents.Folded, "to_local", "the first rank's length (tensor)",
     "_look_up(self.inner.sizes, rank)", "self.inner.sizes[0]"),
    (extents.Folded, "scaled", "blocks are scaled",
     "Folded(self.outer, self.inner.scaled(factor))", "Folded(self.outer * factor, self.inner)"),
    (extents.Folded, "divided", "not divided", "self.inner.divided(factor)", "self.inner"),
)  # fmt: skip


def _extents() -> Iterator[Mutant]:
    by_pair = {f"{t.src} -> {t.dst}": k for k, t in enumerate(TRANSITIONS)}
    moved = tuple(("moves", str(by_pair[p])) for p in ("S -> R", "S -> S", "R -> S"))
    for owner, name, change, old, new in FORMULAS:
        yield Mutant(
            "extents", f"{owner.__name__}.{name}", change,
            partial(Patches.text, owner=owner, name=name, old=old, new=new),
            (("extents", ""), *moved),
        )  # fmt: skip


# ops.ROWS

CALLED = frozenset(call_names())


def _some(row: Row, most: int = 2) -> list[str]:
    """A few names of a row, from both ends: all of a row share their flow."""
    forms = [(n, f"{n}_") for n in row.names.split()]
    names = [next(n for n in pair if n in CALLED) for pair in forms if CALLED & {*pair}]
    step = max(len(names) // most, 1)
    return names[::step][:most]


FLOWS = "placements.flows."

# Ops that keep a number a number.
MOVE_ELEMENTS = frozenset(
    "neg negative positive clone contiguous detach data to type_as view reshape view_as "
    "reshape_as flatten ravel unflatten permute transpose swapaxes swapdims t T mT adjoint "
    "movedim moveaxis squeeze unsqueeze expand broadcast_to expand_as div __getitem__ "
    "repeat dropout".split()
)


def _other_linearity(row: Row, new: Linearity, p: Patches) -> None:
    """The ops' linearity, also where their flow has it written out."""

    def combine(linearity: Linearity, *rest: Any, **named: Any) -> Any:
        return infer.combine(
            new if linearity is row.linearity else linearity, *rest, **named
        )

    def flow(*args: Any, **kwargs: Any) -> Any:
        modules = [m for name, m in sys.modules.items() if name.startswith(FLOWS)]
        with ExitStack() as stack:
            Patches(stack).replaced(modules, infer.combine, combine)
            return row.flow(*args, **kwargs)

    for name in row.names.split():
        p.item(OPS, name, replace(OPS[name], linearity=new, flow=flow))


def _linearities() -> Iterator[Mutant]:
    for row in ROWS:
        names = _some(row)
        killers = (*_sound(*names), *(("refused ops", n) for n in names))
        killers += tuple(("numbers", n) for n in names if n in MOVE_ELEMENTS)
        for new in Linearity:
            if new is not row.linearity:
                yield Mutant(
                    "ops", _called(row), f"{row.linearity.value} -> {new.value}",
                    partial(_other_linearity, row, new), killers,
                )  # fmt: skip


def _called(row: Row) -> str:
    names = row.names.split()
    return f"{row.group}: {names[0]}" + (" ..." if len(names) > 1 else "")


@dataclass(frozen=True)
class _Kept(Op):
    """An op that takes a dim it works along for one that it keeps."""

    def along_label(self, key: str) -> Label:
        last = key.split()[-1]
        return int(last) if last.isdecimal() else 0


def _other_along(row: Row, along: str, p: Patches) -> None:
    for name in row.names.split():
        p.item(OPS, name, replace(OPS[name], along=along))


def _kept_along(row: Row, p: Patches) -> None:
    for name in row.names.split():
        op = OPS[name]
        new = _Kept(op.name, op.group, op.linearity, op.flow, op.along, op.takes)
        p.item(OPS, name, new)


def _along() -> Iterator[Mutant]:
    for row in ROWS:
        if not row.along:
            continue
        names = _some(row)
        killers = (*_sound(*names), *(("refused along", n) for n in names))
        old, new = ("a sum", ops.NEEDS_WHOLE) if row.along == SUM else ("refused", SUM)
        change = f"cut dim: {old} -> {'a sum' if new == SUM else 'refused'}"
        yield Mutant("ops", _called(row), change, partial(_other_along, row, new), killers)
        yield Mutant(
            "ops",
            _called(row),
            f"cut dim: {old} -> kept",
            partial(_kept_along, row),
            killers,
        )
