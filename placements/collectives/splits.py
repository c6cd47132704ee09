"""How many rows of an exchange go to each rank, and come from it.

In compiled code the sizes are symbols, which are looked at when the code runs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from placements._torch import check
from placements.collectives.transport import AxisRanks


def splits(
    x: Tensor,
    ranks: AxisRanks,
    sends: Sequence[int] | None,
    receives: Sequence[int] | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how many rows go to each rank and come from it; equal runs by default."""
    if (sends is None) != (receives is None):
        raise ValueError("give both input_split_sizes and output_split_sizes, or neither")
    if x.dim() == 0:
        raise ValueError("all_to_all exchanges the rows of dim 0, but the tensor has none")
    rows = x.shape[0]
    if sends is None or receives is None:
        if rows % ranks.size:
            raise ValueError(
                f"all_to_all without split sizes needs a multiple of {ranks.size} rows, "
                f"got {rows}"
            )
        even = (rows // ranks.size,) * ranks.size
        return even, even
    if len(sends) != ranks.size or len(receives) != ranks.size:
        raise ValueError(
            f"split sizes need one entry for each of the {ranks.size} ranks of axis "
            f"{ranks.axis!r}, got {len(sends)} and {len(receives)}"
        )
    if torch.compiler.is_dynamo_compiling():
        return _in_trace(rows, ranks, sends, receives)
    if sum(sends) != rows or min(*sends, *receives) < 0:
        raise ValueError(
            f"input_split_sizes {list(sends)} must be >= 0 and sum to the {rows} rows"
        )
    if ranks.size == 1 and sends[0] != receives[0]:
        raise ValueError(
            f"the only rank of axis {ranks.axis!r} sends itself {sends[0]} rows, but "
            f"output_split_sizes says that {receives[0]} come"
        )
    return tuple(sends), tuple(receives)


def _in_trace(
    rows: int, ranks: AxisRanks, sends: Sequence[int], receives: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes, which compiled code does not know yet: it looks when it runs."""
    for size in (*sends, *receives):
        check(size >= 0)
    check(sum(sends) == rows)
    if ranks.size == 1:
        check(sends[0] == receives[0])
    return tuple(sends), tuple(receives)
