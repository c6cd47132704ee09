"""Mutants of infer.py: the checks behind rules.DIM_REASONS."""

from collections.abc import Iterator
from functools import partial

from placements.inference import combine as infer
from tests.mutants.mutant import Mutant, decided, sound
from tests.mutants.patches import Patches

# function, check, what it says, what the mutant says, ops that meet it
DIMS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    ("_agree_on_dim", "other dim: not checked",
     "if other_dim != dim:", "if False:", ("add", "mul", "matmul", "outer")),
    ("_agree_on_dim", "other extent: not checked",
     "if other_extent != extent:", "if False:", ("add", "mul", "where", "matmul")),
    ("_agree_on_dim", "whole operand: not checked",
     "if id(term) in cut or", "if True or id(term) in cut or", ("gather", "scatter_add")),
    ("_agree_on_dim", "the result is cut along the next dim",
     "return Shard(dim, extent)", "return Shard(dim + 1, extent)",
     ("unsqueeze", "transpose", "linear")),
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
     'if letter in "RI" and not', "if False and not",
     ("where", "gather", "embedding")),
)  # fmt: skip


def of_dims() -> Iterator[Mutant]:
    for function, change, old, new, names in DIMS:
        yield Mutant(
            "dims", f"infer.{function}", change,
            partial(Patches.text, owner=infer, name=function, old=old, new=new),
            (("other rows", ""), *sound(*names), *decided(*names), ("programs", "")),
        )  # fmt: skip
