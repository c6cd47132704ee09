"""One exchange of rows over ep, out and back, with splits as they are or made equal.

Made equal, every split is padded at its end with zero rows to one size, so that the
collective takes no list of sizes; what arrives is cut to its splits before anybody sees it.
The zero rows reach no expert, and no gradient: the backward of padding is cutting, and that
of cutting is padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from placements import unchecked
from spmd_moe.paths.recorder import ran


@dataclass(frozen=True)
class Exchange:
    """Rows to each rank and from each; `size` is that of every split, if they are equal.

    For both directions there is what to do before and after the all-to-all, and the sizes
    to give it: a direction is `out` to the experts, or back.
    """

    sent: list[int]
    received: list[int]
    size: int | None = None

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():
            return  # splits without values, which the all-to-all checks when it runs
        if min(*self.sent, *self.received) < 0:
            raise ValueError(
                f"splits must be at least 0, but {self.sent} rows are to go and "
                f"{self.received} to come"
            )
        if self.size is not None and max(*self.sent, *self.received) > self.size:
            raise ValueError(
                f"equal splits of {self.size} rows must hold every split, but {self.sent} "
                f"rows are to go and {self.received} to come"
            )

    def before(self, rows: Tensor, *, out: bool) -> Tensor:
        """Return what to send of `rows`, which lie rank by rank."""
        sizes = self.sent if out else self.received
        return rows if self.size is None else pad(rows, sizes, self.size)

    def sizes(self, *, out: bool) -> tuple[list[int] | None, list[int] | None]:
        """Return the rows to each rank and from each; None if all splits are equal."""
        if self.size is not None:
            return None, None
        return (self.sent, self.received) if out else (self.received, self.sent)

    def after(self, rows: Tensor, *, out: bool) -> Tensor:
        """Return the rows that came, without those of padding."""
        sent, received = (self.sent, self.received) if out else (self.received, self.sent)
        if self.size is None:
            return rows
        name = "equal_split_dispatch" if out else "equal_split_combine"
        ran(name)
        ran(f"{name}_padding", self.size * len(sent) - sum(sent))
        return compact(rows, received, self.size)


def pad(rows: Tensor, splits: Sequence[int], size: int) -> Tensor:
    """Each split in turn, then zero rows up to `size`; `rows` itself if all have it."""
    _check_rows(rows, sum(splits), f"splits {[*splits]}")
    if all(split == size for split in splits):
        return rows
    parts: list[Tensor] = []
    for split, part in zip(splits, torch.split(rows, [*splits]), strict=True):
        parts.append(part)
        if split < size:
            parts.append(rows.new_zeros(size - split, *rows.shape[1:]))
    return torch.cat(parts)


def compact(rows: Tensor, splits: Sequence[int], size: int) -> Tensor:
    """The first rows of each run of `size`, as many as its split: undoes `pad`."""
    _check_rows(rows, len(splits) * size, f"{len(splits)} splits of {size}")
    if all(split == size for split in splits):
        return rows
    starts = range(0, len(splits) * size, size)
    parts = [rows[s : s + split] for s, split in zip(starts, splits, strict=True)]
    return torch.cat(parts)


def _check_rows(rows: Tensor, wanted: int, what: str) -> None:
    with unchecked():  # a look at a size, which nothing is computed with
        found = rows.shape[0]
    if found != wanted:
        raise ValueError(f"{found} rows, but {what} have {wanted}")
