"""What inference is told of an op: its operands, where their dims go; and its refusal."""

from dataclasses import dataclass
from typing import TypeAlias

from placements.types.index import Index
from placements.types.padding import Pads
from placements.types.tensor import TensorType

# The position of an intermediate result inside an op, which has no name.
NO_ARGUMENT = -1

# How the dtypes begin that may have a gradient.
FLOATING = ("float", "bfloat", "complex")


@dataclass(frozen=True)
class Operand:
    """What inference knows of a tensor argument."""

    type: TensorType
    shape: tuple[int, ...]
    dtype: str
    position: int  # which of the call's tensors, in order of appearance

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def can_have_gradient(self) -> bool:
        return self.dtype.startswith(FLOATING)

    @property
    def is_bool(self) -> bool:
        return self.dtype == "bool"

    def cut_axes(self, dim: int) -> tuple[str, ...]:
        return self.type.order(dim)

    def is_one_row(self, dim: int) -> bool:
        """Return whether the dim has one row in all, which may be broadcast.

        One row here may be one of many, where the dim is cut; or one of padding.
        """
        if self.shape[dim] != 1 or dim in self.type.cut_dims:
            return False
        return not any(dim in pads.dims for pads in self.type.pads)


@dataclass(frozen=True)
class Contract:
    """The dim is summed away, together with every dim of the same key."""

    key: str


@dataclass(frozen=True)
class Mixed:
    """The op looks along the dim, so it must not be cut."""

    reason: str


@dataclass(frozen=True)
class Scattered:
    """The dim ends in rows whose number each rank knows only for itself."""


@dataclass(frozen=True)
class Addressed:
    """The dim is addressed by an index of the rank's own rows on these axes."""

    axes: tuple[str, ...]
    otherwise: "Label"


# int: the dim of the result that this dim becomes; None: a dim of one row that is
# broadcast, or that the op does not look at.
Label: TypeAlias = int | Contract | Mixed | Scattered | Addressed | None


@dataclass(frozen=True)
class Term:
    """An operand of an op, the labels of its dims, and whether it carries values.

    `is_index`: it addresses rows, and somebody has seen that it counts those rows.
    """

    operand: Operand
    labels: tuple[Label, ...]
    is_control: bool = False
    is_index: bool = False


def index_term(index: Operand, labels: tuple[Label, ...]) -> Term:
    return Term(index, labels, is_control=True, is_index=True)


# The kind of a refusal that torch itself reports better: the shapes do not fit.
SHAPES = "shapes"

# Why a row of a dim that is cut cannot be taken. It may be meant of each rank's own piece.
PIECEWISE = "it would take rows of each rank's piece, not of the whole dim"


@dataclass(eq=False)
class Refusal(Exception):  # noqa: N818 - a verdict, turned into an error at the boundary
    """Inference found no type: why, on which axis, because of which operand."""

    reason: str
    axis: str | None = None
    operand: Operand | None = None
    expected: str = ""
    kind: str = "unsound"
    # an index operand, and the domain that would make it fit
    index: tuple[Operand, Index] | None = None
    # the rows of padding of `operand` that are in the way
    pads: Pads | None = None
