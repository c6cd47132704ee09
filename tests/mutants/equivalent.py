"""Table: survivors that change nothing a program can observe, and why."""

import re

from placements.inference.ops import ROWS
from placements.inference.rules import LINEAR
from tests.mutants.of_ops import called

ONE_OPERAND = (
    "the op has one value operand: linear in all of them together and linear in each "
    "alone are the same, and no number is added"
)
OTHER_WORDS = (
    "a later row refuses the same operands for the same kind of reason; only the "
    "sentence in the error differs"
)
SCATTERED = (
    "pieces that end nowhere in the result are Varying anyway; only an index that is cut "
    "over the same axis and broadcast with a mask would tell, and as many rows as the mask "
    "selects such an index has by chance of the data alone"
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
_ONLY_PLAIN = (
    "reductions: var ..., unbiased", "along a dim: sort, descending",
    "along a dim: sort, stable", "along a dim: topk, largest", "along a dim: topk, sorted",
    "along a dim: argsort, descending", "along a dim: argsort, stable",
    "gathers: gather, sparse_grad", "views: pad, mode", "random: multinomial, replacement",
)  # fmt: skip
_NO_CAST = (
    "reductions: nansum ..., dtype", "reductions: mean, dtype", "reductions: amax ..., dtype",
    "reductions: nanmean, dtype", "reductions: norm ..., dtype",
    "along a dim: softmax ..., dtype", "along a dim: cumprod ..., dtype",
    "matrix products: grouped_mm ..., out_dtype", "factories: zeros ..., dtype",
    "factories: zeros_like, dtype", "factories: ones ..., dtype",
    "factories: ones_like, dtype", "factories: full ..., dtype",
    "factories: full_like, dtype", "factories: empty ..., dtype",
    "factories: empty_like, dtype", "factories: arange, dtype", "factories: linspace ..., dtype",
    "random: rand_like ..., dtype", "random: normal, dtype", "random: rand ..., dtype",
    "random: randperm, dtype",
)  # fmt: skip
_REFUSED_ANYWAY = (
    "norms and losses: cross_entropy, size_average", "norms and losses: cross_entropy, reduce",
    "norms and losses: nll_loss, size_average", "norms and losses: nll_loss, reduce",
    "norms and losses: mse_loss ..., size_average", "norms and losses: mse_loss ..., reduce",
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
    "roles | gathers: embedding, max_norm | flag -> size": REFUSED_ANYWAY,
    "roles | views: view ..., dtype | dtype -> ": REFUSED_ANYWAY,
    "roles | gathers: embedding, norm_type | flag -> unread": NORM_TYPE,
    "roles | gathers: embedding, norm_type | flag -> size": NORM_TYPE,
    "roles | factories: empty ..., stride | flag -> size": LAYOUT,
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
