"""The parts of a call: operands by shape and kind, and the function that makes it.

A call's function takes tensors only. It may read sizes off them, as a program does, so
the same function is called on a rank's pieces and on the global values; where it cannot
be (sizes written out), `reference` says what the global result is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import strategies as st
from torch import Tensor

T = TypeVar("T")
Function = Callable[..., Any]


@dataclass(frozen=True)
class Given:
    """A global operand: its shape, and what its elements may be.

    `rows_of` (operand, dim): the elements are rows of that operand's dim; `unique` along
    `along`: no row twice. `below`: whole numbers from 0 to it. `ends`: non-decreasing,
    the last one is it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    letters: str = "RSPVI"
    positive: bool = False
    below: int | None = None
    rows_of: tuple[int, int] | None = None
    along: int = 0
    unique: bool = False
    ends: int | None = None
    counts: int | None = None  # declared as an index of so many rows
    fixed: bool = False  # torch has no gradient for it

    @property
    def has_gradient(self) -> bool:
        return self.dtype.is_floating_point and not self.fixed

    @property
    def is_any_number(self) -> bool:
        """Whether nothing is asked of the elements."""
        asked = (self.below, self.rows_of, self.ends)
        return asked == (None, None, None) and self.dtype is not torch.bool


@dataclass(frozen=True)
class OpCall:
    """One call: `run(*operands)`; `reference(*globals, shape)` if it is not the same."""

    name: str
    operands: tuple[Given, ...]
    run: Function
    text: str
    reference: Function | None = None
    # whether the result is drawn anew, so that only claims of equality can be checked
    drawn: bool = False

    def __repr__(self) -> str:
        return self.text


class Builder:
    """Draws the parts of one call of the op `name`."""

    def __init__(
        self, draw: st.DrawFn, name: str, sizes: Sequence[int] = (1, 2, 3, 4, 5, 0)
    ) -> None:
        self.draw = draw
        self.name = name
        self.sizes = sizes
        self.fn = function_of(name)
        self.operands: list[Given] = []

    def pick(self, *options: T) -> T:
        return self.draw(st.sampled_from(options))

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def size(self) -> int:
        return self.pick(*self.sizes)

    def some(self, most: int) -> int:
        """Draw a size from one on; from two on where all dims have several rows."""
        return self.number(1 if min(self.sizes) < 2 else 2, most)

    def rows(self, size: int) -> int:
        """Draw how many rows to address; not all where all dims have several rows."""
        return self.number(0, size) if min(self.sizes) < 2 else self.number(1, size - 1)

    def shape(self, min_dims: int = 0, max_dims: int = 3) -> tuple[int, ...]:
        ndim = self.pick(*sorted(range(min_dims, max_dims + 1), key=lambda n: abs(n - 2)))
        return tuple(self.size() for _ in range(ndim))

    def dim(self, shape: Sequence[int]) -> int:
        """Draw a dim, counted from the front or the back."""
        return self.number(-len(shape), len(shape) - 1)

    def under(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Draw a shape that is broadcast to `shape`."""
        kept = tuple(1 if self.number(0, 3) == 3 else size for size in shape)
        return kept[self.pick(0, 0, 0, min(1, len(shape))) :]

    def value(self, *shape: int, **kind: Any) -> int:
        """Add an operand, and return its number."""
        self.operands.append(Given(shape, **kind))
        return len(self.operands) - 1

    def whole(self, *shape: int, **kind: Any) -> int:
        return self.value(*shape, dtype=torch.int64, **kind)

    def mask(self, *shape: int) -> int:
        return self.value(*shape, dtype=torch.bool, letters="RSVI")

    def index(self, target: int, dim: int, *shape: int, **kind: Any) -> int:
        """Add an index that holds rows of `dim` of an earlier operand."""
        dims = len(self.operands[target].shape)
        return self.whole(*shape, letters="RSVI", rows_of=(target, dim % dims), **kind)

    def call(
        self,
        *args: Any,
        run: Function | None = None,
        reference: Function | None = None,
        drawn: bool = False,
        **kwargs: Any,
    ) -> OpCall:
        """Return the call with these arguments after the operands, or that of `run`."""
        fn = self.fn

        def default(*tensors: Tensor) -> Any:
            return fn(*tensors, *args, **kwargs)

        names = [f"x{k}" for k in range(len(self.operands))]
        said = [*names, *map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())]
        return OpCall(
            self.name, tuple(self.operands), run or default,
            f"{self.name}({', '.join(said)})", reference, drawn,
        )  # fmt: skip


# Where the name in the table is not an attribute of Tensor, torch or functional, or where
# most code reaches another form.
_ELSEWHERE: dict[str, Function] = {
    "log_sigmoid": F.logsigmoid,
    **{name: attrgetter(name) for name in ("data", "T", "mT", "H", "mH", "real", "imag")},
    **{
        name: getattr(F, name)
        for name in "softmax log_softmax dropout alpha_dropout layer_norm rms_norm "
        "embedding binary_cross_entropy_with_logits batch_norm instance_norm group_norm "
        "adaptive_max_pool1d kl_div poisson_nll_loss hinge_embedding_loss soft_margin_loss "
        "margin_ranking_loss cosine_embedding_loss triplet_margin_loss rrelu "
        "cosine_similarity".split()
    },
    "where": torch.where,
}


def function_of(name: str) -> Function:
    """Return the torch function of a name; an in-place function writes to a clone."""
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    for owner in (torch.Tensor, torch, F):
        found = getattr(owner, name, None)
        if callable(found):
            return _on_clone(found) if is_in_place(name) else found
    of_family = _of_family(name)
    if of_family is None:
        raise KeyError(name)
    return of_family


def _of_family(name: str) -> Function | None:
    """Return torch.linalg.norm for linalg_norm."""
    family, _, short = name.partition("_")
    if family not in ("special", "linalg", "fft"):
        return None
    return getattr(getattr(torch, family), short, None)


def is_callable(name: str) -> bool:
    owners = (torch.Tensor, torch, F)
    if name in _ELSEWHERE or _of_family(name) is not None:
        return True
    return any(callable(getattr(o, name, None)) for o in owners)


def is_in_place(name: str) -> bool:
    writes = name.endswith("_") and not name.endswith("__")
    return writes or name == "__setitem__"


def _on_clone(fn: Function) -> Function:
    def write(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        target = x.clone()
        fn(target, *args, **kwargs)
        return target

    return write
