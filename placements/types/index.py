"""What an integer tensor indexes: the rows of a dim, this rank's or all of them.

A gather or scatter is right only if the index counts the rows of the very dim that it
addresses. `Index` says which rows those are. The result of arithmetic is `COMPUTED`, a
number that counts nothing until a declaration says what it counts.
"""

from dataclasses import dataclass
from typing import Final

from placements.types.extents import Extent

# (axis, extent) from the outermost cut to the innermost; empty for a dim held whole.
Cuts = tuple[tuple[str, Extent], ...]


@dataclass(frozen=True, init=False, repr=False)
class Index:
    """The rows that an integer tensor counts.

    `Index(8)`: the 8 rows of a dim that every rank holds whole.
    `Index(Padded(5), "tp")`: this rank's own rows of a dim cut so over `tp`.
    `Index(Padded(5))`: the rows of that dim counted over all ranks, 0 to 4.
    """

    size: int | None
    cuts: Cuts

    def __init__(self, domain: int | Extent, axis: str | None = None) -> None:
        cuts: Cuts = ()
        size: int | None = None
        if axis is not None:
            if not isinstance(domain, Extent):
                raise ValueError(
                    f"Index({domain!r}, {axis!r}): rows of one rank need the extent "
                    f"that says how the dim is cut over {axis!r}"
                )
            cuts = ((axis, domain),)
        else:
            size = domain.total if isinstance(domain, Extent) else domain
            if size < 0:
                raise ValueError(f"Index({size}): a dim has at least 0 rows")
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "cuts", cuts)

    @classmethod
    def of_cuts(cls, cuts: Cuts) -> "Index":
        """Count this rank's own rows of a dim cut over several axes, outermost first."""
        made = cls(0)
        object.__setattr__(made, "size", None)
        object.__setattr__(made, "cuts", cuts)
        return made

    @classmethod
    def of_rows(cls, cuts: Cuts, size: int) -> "Index":
        """Count the rows of a dim: this rank's own if it is cut, else all `size`."""
        return cls.of_cuts(cuts) if cuts else cls(size)

    def divided(self, factor: int) -> "Index | None":
        """Return what `index // factor` counts: runs of `factor` rows, if all are whole."""
        if not self.cuts:
            assert self.size is not None
            return None if self.size % factor else Index(self.size // factor)
        runs = [(axis, extent.divided(factor)) for axis, extent in self.cuts]
        cuts = tuple((axis, extent) for axis, extent in runs if extent is not None)
        return Index.of_cuts(cuts) if len(cuts) == len(runs) else None

    def __repr__(self) -> str:
        if not self.cuts:
            return f"Index({self.size})"
        if len(self.cuts) == 1:
            axis, extent = self.cuts[0]
            return f"Index({extent!r}, {axis!r})"
        return f"Index.of_cuts({self.cuts!r})"


@dataclass(frozen=True, repr=False)
class Computed:
    """The domain of a number that arithmetic made: nobody said what it indexes.

    `counts`: the rows that it counts if it is an index, as the quotient of an index counts
    runs of rows.
    """

    counts: Index | None = None

    def __repr__(self) -> str:
        return "computed by arithmetic"


COMPUTED: Final = Computed()
