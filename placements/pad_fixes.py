"""Fixes for an op that rows of padding keep from being right: mask them, or leave them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from placements.errors import Fix
from placements.terms import Operand, Refusal
from placements.validity import Pads

Infer = Callable[[Sequence[Operand]], object]

# How many operands a fix may have to mask.
_MOST = 4


def pad_advice(refusal: Refusal) -> str:
    """What to do where no change of one operand helps."""
    if refusal.pads is None:
        return ""
    return (
        "mask first (torch.where(valid, x, 0)) what is summed; leave rows of padding out "
        "(x[valid]) before what looks along their dim; valid is the mask of these rows"
    )


def pad_fixes(
    infer: Infer,
    operands: Sequence[Operand],
    names: Sequence[str],
    refusal: Refusal,
    kept: int,
) -> list[Fix]:
    """Masking the rows of padding, or leaving them out: what makes the op right.

    The first `kept` operands are not to be changed: an in-place op writes them.
    """
    found = [
        _tried(change, infer, operands, names, refusal, kept) for change in (_masked, _left)
    ]
    return [fix for fix in found if fix is not None]


_Change = Callable[[Operand, Pads, str], tuple[Operand, str] | None]


def _tried(
    change: _Change,
    infer: Infer,
    operands: Sequence[Operand],
    names: Sequence[str],
    refusal: Refusal,
    kept: int,
) -> Fix | None:
    changed, texts = list(operands), list(names)
    for _ in range(_MOST):
        operand, pads = refusal.operand, refusal.pads
        if operand is None or pads is None or operand.position < kept:
            return None
        k = operand.position
        made = change(changed[k], pads, texts[k]) if pads in changed[k].type.pads else None
        if made is None:
            return None
        changed[k], texts[k] = made
        try:
            infer(changed)
        except Refusal as again:
            refusal = again
            continue
        except (LookupError, ValueError, TypeError):
            return None
        calls = [text for text, name in zip(texts, names, strict=True) if text != name]
        return Fix("; ".join(calls), "nothing", "nothing")
    return None


def _masked(x: Operand, pads: Pads, text: str) -> tuple[Operand, str] | None:
    """The rows of padding set to zero."""
    if pads.holds == 0:
        return None
    zeros = replace(pads, holds=0)
    others = tuple(zeros if one == pads else one for one in x.type.pads)
    masked = f"torch.where({pads.mask(x.ndim)}, {text}, 0)"
    return replace(x, type=x.type.with_pads(others)), masked


def _left(x: Operand, pads: Pads, text: str) -> tuple[Operand, str] | None:
    """The rows of padding left out, of a tensor that is used alone with its mask."""
    if any(x.cut_axes(dim) for dim in pads.dims) or pads.dims[0] != 0:
        return None
    left = replace(x, type=x.type.with_pads(tuple(p for p in x.type.pads if p != pads)))
    first = pads.validity.first
    if first is not None and len(pads.dims) == 1:
        return replace(left, shape=(first, *x.shape[1:])), f"{text}[:{first}]"
    if pads.dims != tuple(range(len(pads.dims))) or len(x.type.pads) > 1:
        return None
    rows = replace(pads, dims=(0,)).mask(1)
    return replace(left, shape=(x.shape[0], *x.shape[len(pads.dims) :])), f"{text}[{rows}]"
