"""Table: survivors that change nothing a program can observe, and why."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import partial

from placements.inference.op import Flow, parsed_slots
from placements.inference.ops import ROWS, Row
from placements.inference.rules import LINEAR, NO_VALUES, NONLINEAR
from placements.testing.forms.signatures import signatures
from tests.mutants.of_ops import called
from tests.mutants.of_roles import names_of

ONE_OPERAND = (
    "the op has one value operand: linear in all of them together and linear in each "
    "alone are the same, and no number is added"
)
ONE_AT_A_TIME = (
    "the flow gives the row's linearity one value operand at a time, and linear in all of "
    "them together and linear in each alone are the same for one"
)
NO_VALUE = (
    "no operand of the op is a value: what is combined is the one sum of the counts, which "
    "is the outermost step whatever the elements went through before"
)
BOOLS = (
    "the result is of bools, and a Partial of bools is refused where the result is made, so "
    "a Partial operand is refused still, in other words"
)
OWN_ROWS = (
    "the flow asks what becomes of a cut dim only where it has rows of padding, and a "
    "non-linear op that sums them is refused as one that looks along them is"
)
THREE_ROWS = "torch takes three rows along that dim, and a piece of three rows has fewer"
FITTING = (
    "torch takes the numbers of fold where they make as many windows as there are columns, "
    "so that it refuses another number on some rank, or the number makes no difference"
)
SPARSE = "only the layout of the gradient differs, and not its elements"
STABLE = "which of equal elements comes first nobody claims, and on a CPU it is the same"
SAME_HEADS = (
    "torch refuses heads of other numbers without it, and of the same number it changes "
    "nothing"
)
DRIVER = "torch takes a driver on CUDA alone, and there it does not change the result"
OTHER_WORDS = (
    "a later row refuses the same operands for the same kind of reason; only the "
    "sentence in the error differs"
)
SCATTERED = (
    "pieces that end nowhere in the result are Varying anyway; only an index that is cut "
    "over the same axis and broadcast with a mask would tell, and as many rows as the mask "
    "selects such an index has by chance of the data alone"
)

MADE_OF_FLOATS = "the op takes no bools, and a number made of two zeros is zero"
TAKES_NO_BOOLS = (
    "the op takes no bools, and only of bools does the table say that zeros flip"
)

OTHER_TOTALS = (
    "an outer cut counts all rows and an inner one those of a run, so axes that cut in "
    "another order have other extents on some rank, and are refused there for these"
)
NO_DIM = "a row of draws cannot say along which dim: it is refused still, in other words"

ONLY_PLAIN = (
    "torch takes nothing but a plain bool or word there, and the flow does not look at it"
)
NO_CAST = (
    "a dtype matters where whole numbers are made of a Partial, and here none is: the op "
    "takes no Partial, makes its numbers itself, or has floats alone"
)
SAID_BY_SHAPES = (
    "with plain settings beside it, the shapes of the operands say what the number is, and "
    "torch refuses another"
)
SAID_BY_REPEATS = "it says again what the repeats add up to, and torch refuses another"
PROMISED = (
    "it is a promise that elements are unique: where it is kept the result is the same, and "
    "where it is not torch's own result is undefined"
)
ONLY_RAISES = (
    "it decides whether torch raises for a matrix that has no result, and what is returned "
    "is the same"
)
AS_TUPLE = "all parts of a result have the one type that is inferred, as a tuple of it says"
NORM_TYPE = "the order of a norm matters only beside max_norm, which is refused"
LAYOUT = (
    "memory that nobody wrote has no values, so no type is false whatever the order is in "
    "which its elements lie there"
)
TENSORS_TOO = (
    "the flow refuses every tensor there and every number of an axis, and so does a flag; "
    "only the sentence in the error differs"
)
REFUSED_ANYWAY = (
    "the flow refuses every value of this setting but the default, and so does a row that "
    "does not name it; only the sentence in the error differs"
)

_REFUSED_TWICE = (
    "rules | 3 linear, has P, only VSRP | dropped",
    "rules | 4 linear, has P, only VSRP | dropped",
    "rules | 6 multilinear, has P, only PR | dropped",
    "rules | 7 multilinear, has P, only VSRP | dropped",
    "rules | 8 non-linear, has P, only RIVSP | dropped",
)
# Rows of linear ops with one slot for a value, which holds one tensor.
_ONE_OPERAND = tuple(
    called(row)
    for row in ROWS
    if row.linearity is LINEAR
    and re.search(r"(^|; )value [\w/]+(;|$)", row.slots)
    and "tensors" not in row.slots
)
_ONE_AT_A_TIME = (
    "quotients: addcdiv", "views: broadcast_tensors", "views: meshgrid",
    "views: atleast_1d", "views: atleast_2d", "views: atleast_3d",
)  # fmt: skip
_BOOLS = ("reductions: all ...", "counting: isin")


def _looks_at(flow: Flow, slot: str) -> bool:
    """Whether the source of a flow mentions a slot, or what takes all that it has no name for."""
    while isinstance(flow, partial):  # what it presets is not what a call gives
        flow = flow.func
    tree = ast.parse(textwrap.dedent(inspect.getsource(flow)))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    parameters = inspect.signature(flow).parameters
    rest = [p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD]
    return slot in used or (slot not in parameters and bool(used & set(rest)))


def _only_plain(row: Row) -> Iterator[str]:
    """Slots that the flow does not look at, where torch takes a word, or a plain bool.

    A function of torch refuses a number for a bool; torch.ops takes it.
    """
    roles, others = parsed_slots(row.slots)
    for slot, role in roles.items():
        names = names_of(slot, others)
        ways = [
            (way.head, each.kind)
            for op in row.names.split()
            for way in signatures(op)
            for each in way.slots
            if each.name in names
        ]
        words = all(
            kind == "text" or (kind == "flag" and not head.startswith("torch.ops"))
            for head, kind in ways
        )
        if role == "flag" and ways and words and not _looks_at(row.flow, slot):
            yield f"{called(row)}, {slot}"


_ONLY_PLAIN = tuple(slot for row in ROWS for slot in _only_plain(row))
_NO_CAST = (
    *(f"{called(row)}, {slot}" for row in ROWS if row.linearity in (NONLINEAR, NO_VALUES)
      for slot, role in parsed_slots(row.slots)[0].items() if role == "dtype"),
    "reductions: mean, dtype", "matrix products: grouped_mm ..., out_dtype",
)  # fmt: skip
_FOLD = tuple(
    f"roles | windows: fold, {slot} | flag -> "
    for slot in ("output_size", "kernel_size", "dilation", "padding", "stride")
)
_REFUSED_ANYWAY = (
    *(f"{called(row)}, {slot}" for row in ROWS if row.group == "norms and losses"
      for slot in ("size_average", "reduce") if slot in row.slots.split()),
    "gathers: embedding, max_norm", "gathers: embedding, scale_grad_by_freq",
    "scatters: scatter, reduce",
)  # fmt: skip
# the beginning of a mutant's name -> why no law can tell it from the original
EQUIVALENT: dict[str, str] = {
    **dict.fromkeys(_REFUSED_TWICE, OTHER_WORDS),
    **{f"roles | {slot} | flag -> left out": REFUSED_ANYWAY for slot in _REFUSED_ANYWAY},
    **{f"ops | {row} | linear -> multilinear": ONE_OPERAND for row in _ONE_OPERAND},
    **{f"roles | {slot} | flag -> unread": ONLY_PLAIN for slot in _ONLY_PLAIN},
    **{f"roles | {slot} | dtype -> unread": NO_CAST for slot in _NO_CAST},
    **{f"ops | {row} | linear -> multilinear": ONE_AT_A_TIME for row in _ONE_AT_A_TIME},
    **{f"ops | {row} | non-linear -> ": BOOLS for row in _BOOLS},
    **{f"{start}{new}": FITTING for start in _FOLD for new in ("size", "unread")},
    "roles | gathers: gather, sparse_grad | flag -> unread": SPARSE,
    "roles | along a dim: sort, stable | flag -> unread": STABLE,
    "roles | along a dim: argsort, stable | flag -> unread": STABLE,
    "roles | matrix products: scaled_dot_product_attention, enable_gqa | flag -> unread": SAME_HEADS,
    "ops | counting: histc | linear -> ": NO_VALUE,
    "columns | complex numbers: complex | of zeros: zeros stay": MADE_OF_FLOATS,
    "columns | complex numbers: complex | of zeros: zero becomes one": TAKES_NO_BOOLS,
    "columns | complex numbers: polar | of zeros: zeros stay": MADE_OF_FLOATS,
    "columns | complex numbers: polar | of zeros: zero becomes one": TAKES_NO_BOOLS,
    "ops | reductions: all ... | cut dim: refused -> ": OWN_ROWS,
    "ops | matrix products: cross | cut dim: refused -> ": THREE_ROWS,
    "ops | matrix products: linalg_cross | cut dim: refused -> ": THREE_ROWS,
    "roles | matrices: cholesky ..., driver | flag -> ": DRIVER,
    "roles | gathers: embedding, max_norm | flag -> size": REFUSED_ANYWAY,
    "roles | views: view ..., dtype | dtype -> ": REFUSED_ANYWAY,
    "roles | gathers: embedding, norm_type | flag -> unread": NORM_TYPE,
    "roles | gathers: embedding, norm_type | flag -> size": NORM_TYPE,
    "roles | factories: empty ..., stride | flag -> ": LAYOUT,
    "roles | windows: conv1d ..., groups | choice -> size": SAID_BY_SHAPES,
    "roles | scatters: select_scatter ..., end | choice -> size": SAID_BY_SHAPES,
    "roles | scatters: select_scatter ..., end | choice -> unread": SAID_BY_SHAPES,
    "roles | views: repeat_interleave, output_size | choice -> size": SAID_BY_REPEATS,
    "roles | views: repeat_interleave, output_size | choice -> unread": SAID_BY_REPEATS,
    "roles | matrices: cholesky ..., check_errors | flag -> unread": ONLY_RAISES,
    "roles | counting: isin, assume_unique | flag -> unread": PROMISED,
    "roles | random: normal, std | value -> flag": TENSORS_TOO,
    "roles | gathers: nonzero ..., as_tuple | flag -> unread": AS_TUPLE,
    "dims | infer._join_axis | Scattered keeps its letter": SCATTERED,
    "dims | infer._in_order | other order: not checked": OTHER_TOTALS,
    "draws | V, shared generator | refused -> S": NO_DIM,
    "draws | I, own generator | refused -> S": NO_DIM,
    "draws | P, own generator | refused -> S": NO_DIM,
}


def why_equivalent(name: str) -> str | None:
    """The reason in words, if there is one."""
    return next((why for start, why in EQUIVALENT.items() if name.startswith(start)), None)
