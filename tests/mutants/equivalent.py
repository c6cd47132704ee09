"""Table: survivors that change nothing a program can observe, and why."""

ONE_OPERAND = (
    "the op has one value operand: linear in all of them together and linear in each "
    "alone are the same, and no number is added"
)
NO_RULE = "the flow carries the cuts over by itself and asks no rule: nothing reads this"
NO_VALUES = "no operand carries values that could be pending a sum: nothing reads this"
OTHER_WORDS = (
    "a later row refuses the same operands for the same kind of reason; only the "
    "sentence in the error differs"
)
ONLY_CONTRACTED = (
    "the ids are a control, so the one value is the sum over the cut dim itself, and a "
    "contraction of a non-linear op is taken as multilinear anyway"
)

NOT_READ = "the flow has the sum over a cut dim written out: nothing reads this column"
DRAWS_DECIDE = "the table DRAWS alone decides what a drawn sample is: nothing reads this"

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
    "views: tril ...",
)  # fmt: skip
_NO_RULE = (
    "views: view ...", "views: view_as ...", "views: flatten", "views: ravel",
    "views: unflatten",
)  # fmt: skip
_NO_VALUES = ("factories: zeros ...", "factories: empty ...", "factories: arange ...",
              "random: rand_like ...", "random: rand ...")  # fmt: skip

# the beginning of a mutant's name -> why no law can tell it from the original
EQUIVALENT: dict[str, str] = {
    **dict.fromkeys(_REFUSED_TWICE, OTHER_WORDS),
    **{f"ops | {row} | linear -> multilinear": ONE_OPERAND for row in _ONE_OPERAND},
    "ops | counting: bincount ... | non-linear -> ": ONLY_CONTRACTED,
    "ops | counting: bincount ... | cut dim: ": NOT_READ,
    "ops | random: bernoulli ... | non-linear -> ": DRAWS_DECIDE,
    **{f"ops | {row} | linear -> ": NO_RULE for row in _NO_RULE},
    **{
        f"ops | {row} | {old} -> ": NO_VALUES
        for row in _NO_VALUES
        for old in ("linear" if row.startswith("factories") else "non-linear",)
    },
}


def why_equivalent(name: str) -> str | None:
    """The reason in words, if there is one."""
    return next((why for start, why in EQUIVALENT.items() if name.startswith(start)), None)
