"""Table: survivors that change nothing a program can observe, and why."""

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

_REFUSED_TWICE = (
    "rules | 3 linear, has P, only VSRP | dropped",
    "rules | 4 linear, has P, only VSRP | dropped",
    "rules | 6 multilinear, has P, only PR | dropped",
    "rules | 7 multilinear, has P, only VSRP | dropped",
    "rules | 8 non-linear, has P, only RIVSP | dropped",
)
_ONE_OPERAND = (
    "reductions: sum", "reductions: mean", "along a dim: cumsum", "along a dim: flip",
    "along a dim: roll", "gathers: gather", "gathers: take_along_dim",
    "gathers: index_select", "gathers: embedding", "gathers: masked_select",
    "views: narrow", "views: select", "views: unbind", "views: split ...",
    "views: tril ...", "counting: bincount", "norms and losses: nll_loss",
)  # fmt: skip
_ONLY_PLAIN = (
    "reductions: var ..., unbiased", "along a dim: sort, descending",
    "along a dim: sort, stable", "along a dim: topk, largest", "along a dim: topk, sorted",
    "along a dim: argsort, descending", "along a dim: argsort, stable",
    "gathers: gather, sparse_grad", "views: pad, mode", "random: multinomial, replacement",
    "random: rand_like ..., mode", "random: rand_like ..., nonlinearity",
)  # fmt: skip
_NO_CAST = (
    "reductions: nansum ..., dtype", "reductions: mean, dtype", "reductions: amax ..., dtype",
    "reductions: nanmean, dtype", "reductions: norm ..., dtype",
    "along a dim: softmax ..., dtype", "along a dim: cumprod ..., dtype",
    "matrix products: grouped_mm ..., out_dtype", "factories: zeros ..., dtype",
    "factories: zeros_like, dtype", "factories: ones ..., dtype",
    "factories: ones_like, dtype", "factories: full ..., dtype",
    "factories: full_like, dtype", "factories: empty ..., dtype",
    "factories: empty_like, dtype", "factories: arange ..., dtype",
    "random: rand_like ..., dtype", "random: normal, dtype", "random: rand ..., dtype",
    "random: randperm, dtype",
)  # fmt: skip
# the beginning of a mutant's name -> why no law can tell it from the original
EQUIVALENT: dict[str, str] = {
    **dict.fromkeys(_REFUSED_TWICE, OTHER_WORDS),
    **{f"ops | {row} | linear -> multilinear": ONE_OPERAND for row in _ONE_OPERAND},
    **{f"roles | {slot} | flag -> unread": ONLY_PLAIN for slot in _ONLY_PLAIN},
    **{f"roles | {slot} | dtype -> unread": NO_CAST for slot in _NO_CAST},
    "dims | infer._join_axis | Scattered keeps its letter": SCATTERED,
    "dims | infer._in_order | other order: not checked": OTHER_TOTALS,
    "draws | V, shared generator | refused -> S": NO_DIM,
}


def why_equivalent(name: str) -> str | None:
    """The reason in words, if there is one."""
    return next((why for start, why in EQUIVALENT.items() if name.startswith(start)), None)
