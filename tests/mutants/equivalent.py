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
# the beginning of a mutant's name -> why no law can tell it from the original
EQUIVALENT: dict[str, str] = {
    **dict.fromkeys(_REFUSED_TWICE, OTHER_WORDS),
    **{f"ops | {row} | linear -> multilinear": ONE_OPERAND for row in _ONE_OPERAND},
    "dims | infer._join_axis | Scattered keeps its letter": SCATTERED,
    "dims | infer._in_order | other order: not checked": OTHER_TOTALS,
    "draws | V, shared generator | refused -> S": NO_DIM,
}


def why_equivalent(name: str) -> str | None:
    """The reason in words, if there is one."""
    return next((why for start, why in EQUIVALENT.items() if name.startswith(start)), None)
