"""Lines that people write: refused, or accepted with a type that is true.

The lines are those on which the first release gave false types. What a line means is what
it does on one device with the global values.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that users give it
from torch import Tensor

from placements import (
    Mesh,
    Padded,
    PlacementError,
    R,
    S,
    V,
    assert_type,
    axis_rank,
    current_mesh,
    join,
    set_current_mesh,
    split,
    type_of,
    typecheck,
)
from placements.types.axis import P

REFUSED = "refused"
OWN = "each rank's own"  # Varying: it claims nothing of the whole


def whole(*shape: int) -> Tensor:
    count = math.prod(shape)
    return (torch.arange(count, dtype=torch.float64) % 7 - 3).reshape(shape)


X, Y, B = whole(4, 3), whole(4, 3) + 1, whole(3)
ROWS = whole(2, 4, 3)  # one row per rank on two ranks
UNEVEN = whole(3, 4, 2)
IDS = torch.tensor([2, 0, 1, 1])
VALUES = whole(4)


def on_ranks(
    line: Callable[..., Any], values: dict[str, tuple[Tensor, Any]], size: int
) -> list[Any]:
    """What the line gives on every rank: a result and its type, or the refusal."""
    found: list[Any] = []
    pieces = {
        name: split(value, {"a": t}, {"a": size}) for name, (value, t) in values.items()
    }
    for rank in range(size):
        with set_current_mesh(Mesh({"a": size}, {"a": rank})), typecheck():
            own = {
                name: assert_type(pieces[name][rank], {"a": t})
                for name, (_, t) in values.items()
            }
            try:
                result = line(**own)
                found.append((result, type_of(result)))
            except PlacementError as error:
                found.append(error)
    return found


def check(
    line: Callable[..., Any],
    values: dict[str, tuple[Tensor, Any]],
    said: Any,
    size: int = 2,
) -> None:
    found = on_ranks(line, values, size)
    if said is REFUSED:
        assert all(isinstance(each, PlacementError) for each in found)
        return
    for each in found:
        assert not isinstance(each, PlacementError), each
    types = [dict(each[1]) for each in found]
    assert all(t == types[0] for t in types)
    if said is OWN:
        assert types[0] == {"a": V}
        return
    assert types[0] == {"a": said}
    expected = line(**{name: value for name, (value, _) in values.items()})
    held = [each[0].detach() for each in found]
    assert torch.equal(join(held, types[0], {"a": size}).to(expected.dtype), expected)


x, r, p, v = (X, S(0)), (Y, R), (X, P), (X, V)
b = (B, R)

LINES: dict[str, tuple[Callable[..., Any], dict[str, tuple[Tensor, Any]], Any]] = {
    # 1. views
    "one row per rank, flattened and back": (
        lambda x: x.flatten(0, 1).view(-1, 4, 3).sum(1), {"x": (ROWS, S(0))}, S(0)),
    "one head per rank beside -1": (
        lambda x: x.view(2, 4, -1, 3), {"x": (whole(2, 4, 6), S(2))}, S(2)),
    "a sum over heads": (
        lambda x: x.view(8, -1, 3).sum(1), {"x": (whole(2, 4, 6), S(2))}, P),
    "view(1, -1)": (lambda x: x.view(1, -1), {"x": (ROWS, S(0))}, S(1)),
    "an uneven view back to its own shape": (
        lambda x: x.flatten(0, 1).view(x.shape), {"x": (UNEVEN, S(0, Padded(3)))},
        S(0, Padded(3))),
    "unflatten on the rank that holds one row": (
        lambda x: x.flatten(0, 1).unflatten(0, (-1, 4)), {"x": (UNEVEN, S(0, Padded(3)))},
        S(0, Padded(3))),
    # 2. constants
    "zeros_like plus": (lambda x, b: torch.zeros_like(x) + b, {"x": x, "b": b}, S(0)),
    "ones_like times": (
        lambda x, b: (torch.ones_like(x) * b).sum(0), {"x": x, "b": b}, P),
    "ones_like of Varying": (lambda v: torch.ones_like(v).sum(), {"v": v}, OWN),
    "zeros_like filled by a sum": (
        lambda x, p: torch.zeros_like(x).fill_(p[0, 0]), {"x": x, "p": p}, REFUSED),
    "full_like of a rank": (
        lambda x: torch.full_like(x, axis_rank("a")), {"x": (X, R)}, OWN),
    # 3. sizes of pieces
    "a mean by a mask of ones": (
        lambda x: (x * torch.ones(x.shape[0])[:, None]).sum() / torch.ones(x.shape[0]).sum(),
        {"x": x}, REFUSED),
    "new_ones": (lambda x: x.new_ones(x.shape).sum(0), {"x": x}, P),
    "arange(n).sum()": (lambda x: torch.arange(x.shape[0]).sum(), {"x": x}, OWN),
    "expand_as": (lambda b, x: b.expand_as(x).sum(0), {"b": b, "x": x}, P),
    "repeat by a size": (lambda b, x: b.repeat(x.shape[0], 1), {"b": b, "x": x}, OWN),
    "rows up to a size": (lambda r, x: r[: x.shape[0]], {"r": r, "x": x}, OWN),
    "shape.numel()": (lambda x: x.sum() / x.shape.numel(), {"x": x}, REFUSED),
    "cls.expand(B, -1, -1)": (
        lambda c, x: c.expand(x.shape[0], -1, -1), {"c": (whole(1, 1, 3), R), "x": x}, S(0)),
    # 4. a factor that equals the axis size
    "a divisor of two sizes": (
        lambda x: x.sum() / (x.shape[0] * 2), {"x": x}, REFUSED),
    "the size of selected rows": (
        lambda x: x.sum() / x[x[:, 0] > 0].shape[0], {"x": x}, REFUSED),
    "rows up to a size of Varying": (lambda r, v: r[: v.shape[0]], {"r": r, "v": v}, OWN),
    # 5. tensors in slices and integer slots
    "a slice by Varying": (
        lambda r, n: r[n : n + 2], {"r": r, "n": (torch.tensor([0, 1]), V)}, REFUSED),
    "narrow by Varying": (
        lambda r, n: r.narrow(0, n, 2), {"r": r, "n": (torch.tensor([0, 1]), V)}, REFUSED),
    "split by Varying": (
        lambda r, n: r.split(list(n))[0], {"r": r, "n": (torch.tensor([[1, 3]] * 2), V)},
        REFUSED),
    "std by Varying": (
        lambda r, n: r.std(0, correction=n), {"r": r, "n": (torch.tensor([0, 1]), V)}, REFUSED),
    "addmm by Varying": (
        lambda r, n: torch.addmm(r, r, r[:3], alpha=n),
        {"r": r, "n": (torch.tensor([0, 1]), V)}, REFUSED),
    "layer_norm eps": (
        lambda r, n: F.layer_norm(r, (3,), eps=n),
        {"r": r, "n": (torch.tensor([0.5, 1.0], dtype=torch.float64), V)}, REFUSED),
    # 6. numpy and odd classes
    "a sum plus numpy": (lambda p: p + np.float32(3), {"p": p}, REFUSED),
    "a sum plus numpy, in place": (lambda p: p.add_(np.int64(3)), {"p": p}, REFUSED),
    "where with numpy": (lambda p: torch.where(p > 0, p, np.float64(1)), {"p": p}, REFUSED),
    "sum over numpy's dim": (lambda x: x.sum(np.int64(1)), {"x": x}, S(0)),
    "sum over a tensor's dim": (lambda x: x.sum(torch.tensor(1)), {"x": x}, REFUSED),
    "sort along numpy's dim": (lambda x: x.sort(np.int64(0))[0], {"x": x}, REFUSED),
    "rows by a list": (lambda x: x[[0, 1]], {"x": (whole(2, 4, 6), S(2))}, REFUSED),
    "rows by an array": (lambda x: x[np.array([0, 1])], {"x": x}, REFUSED),
    "rows by a tuple": (lambda x: x[(0, 1), :], {"x": x}, REFUSED),
    "rows by a range": (lambda x: x[range(2)], {"x": x}, REFUSED),
    "rows by True": (lambda x: x[True], {"x": x}, REFUSED),
    # 7. one row against a constant of the global size
    "one row plus zeros": (
        lambda x: x + torch.zeros(2, 3), {"x": (whole(2, 3), S(0))}, REFUSED),
    "mse_loss with zeros": (
        lambda x: F.mse_loss(x, torch.zeros(2, 3, dtype=torch.float64), reduction="sum"),
        {"x": (whole(2, 3), S(0))}, REFUSED),
    # 8. ranks
    "the coordinate": (lambda r: r * current_mesh().coordinate["a"], {"r": r}, OWN),
    "pad by a rank": (lambda r: F.pad(r, (axis_rank("a"), 0)), {"r": r}, OWN),
    "lerp by a rank": (lambda r: torch.lerp(r, r + 1, axis_rank("a")), {"r": r}, OWN),
    "chunks by a rank": (
        lambda r: r.chunk(2)[axis_rank("a") : axis_rank("a") + 1][0], {"r": r}, OWN),
    "abs of a rank": (lambda r: r * abs(-axis_rank("a")), {"r": r}, OWN),
    "divmod of a rank": (lambda r: r * divmod(axis_rank("a") + 1, 2)[0], {"r": r}, OWN),
    "xor of a rank": (lambda r: r * (axis_rank("a") ^ 1), {"r": r}, OWN),
    "shift of a rank": (lambda r: r * (axis_rank("a") >> 0), {"r": r}, OWN),
    # 12. other orders of arguments
    "x.where": (lambda x, b: x.where(x > 0, b), {"x": x, "b": b}, S(0)),
    "where by keyword": (
        lambda x, b: torch.where(x > 0, other=b, input=x), {"x": x, "b": b}, S(0)),
    "torch.embedding": (
        lambda r, i: torch.embedding(r, i), {"r": r, "i": (IDS, S(0))}, S(0)),
    "squeeze(())": (lambda x: x.squeeze(()), {"x": (whole(2, 3), S(0))}, S(0)),
    # what attackers found
    "copied into a buffer of a piece's size": (
        lambda x, b: torch.zeros_like(x).copy_(b).sum(0), {"x": x, "b": b}, P),
    "a number read from Varying": (
        lambda r, n: r * n.item(), {"r": r, "n": (torch.tensor([0.5, 1.0]), V)}, OWN),
    "int() of Varying": (
        lambda r, n: r[: int(n)], {"r": r, "n": (torch.tensor([0, 1]), V)}, REFUSED),
    "the size of another cut in a view": (
        lambda y, z: y.view(-1, z.shape[0]),
        {"y": (whole(3, 4), S(1)), "z": (whole(3), S(0, Padded(3)))}, REFUSED),
    # 14. rounded Partials
    "a cast by class": (lambda p: p.type(torch.LongTensor), {"p": p}, REFUSED),
    "written into integers": (
        lambda p: torch.zeros(4, 3, dtype=torch.long).copy_(p), {"p": p}, REFUSED),
    "filled into integers": (
        lambda p, i: i.masked_fill(i > 0, p[0, 0].long()),
        {"p": p, "i": (IDS, R)}, REFUSED),
    "small integers wrap": (lambda i: i.to(torch.uint8), {"i": (IDS, P)}, REFUSED),
    "bincount with few bins": (
        lambda i: torch.bincount(i, minlength=2), {"i": (IDS, S(0))}, REFUSED),
    # refused though right, in the first release
    "mm by keyword": (lambda x, w: torch.mm(x, mat2=w), {"x": x, "w": (whole(3, 2), R)}, S(0)),
    "full by keyword": (
        lambda x: torch.full(size=(x.shape[0], 2), fill_value=2.0), {"x": x}, S(0)),
    "zeros(B, C) @ w + x": (
        lambda x, w: torch.zeros(x.shape[0], 3, dtype=torch.float64) @ w + x,
        {"x": x, "w": (whole(3, 3), R)}, S(0)),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_a_line_is_refused_or_true(name: str) -> None:
    check(*LINES[name])


def test_the_memo_keeps_calls_apart() -> None:
    """A list and a tuple in brackets, and the ends of bins, are different calls."""
    with set_current_mesh({"a": 2}), typecheck():
        counted = assert_type(VALUES, {"a": S(0)})
        assert type_of(torch.histc(counted, 4, 1.0, 2.0)) == {"a": P}
        with pytest.raises(PlacementError):
            torch.histc(counted, 4, 1.0, 1.0)


def test_a_leaf_of_a_factory_is_no_constant() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        weight = torch.zeros(3, requires_grad=True)
        same = assert_type(torch.ones(3), {"a": "I"})
        with pytest.raises(PlacementError, match="Invariant"):
            same * weight
