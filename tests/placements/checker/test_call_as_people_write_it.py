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
    Ragged,
    S,
    V,
    assert_type,
    axis_rank,
    current_mesh,
    join,
    reinterpret,
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


def filled(buffer: Tensor, x: Tensor) -> Tensor:
    """Fill a buffer through a subscript, through a view, and in place."""
    buffer[:, 0] = x[:, 0]
    buffer[:, 1].copy_(x[:, 1])
    buffer[:, 2:].zero_()
    buffer[:, 2:] += x[:, 2:]
    return buffer * 2


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
    # A sum over ranks of bools, and statistics that a batch leaves in a constant.
    "experts that were used": (
        lambda ids: torch.zeros(3, dtype=torch.bool).scatter_add(
            0, ids, torch.ones_like(ids, dtype=torch.bool)), {"ids": (IDS, S(0))}, REFUSED),
    "any, by a sum of bools": (
        lambda x: (x > 0).sum(0, dtype=torch.bool), {"x": x}, REFUSED),
    "running statistics of own rows": (
        lambda v: F.batch_norm(v, torch.zeros(3), torch.ones(3), training=True),
        {"v": v}, REFUSED),
    "a loss into out=": (
        lambda r: torch.ops.aten.mse_loss(r, r, out=torch.zeros((), dtype=r.dtype)),
        {"r": r}, REFUSED),
    "an index of rows beside a list": (
        lambda y: y.index_put((torch.tensor([0, 1]), torch.arange(y.shape[1])), torch.tensor(9.0, dtype=y.dtype)),
        {"y": (whole(2, 2), S(1))}, REFUSED),
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
    "repeat by a size": (lambda b, x: b.repeat(x.shape[0], 1), {"b": b, "x": x}, S(0)),
    "rows by a size": (lambda r, x: r.repeat(x.shape[0], 1), {"r": r, "x": x}, S(0)),
    "repeat by an uneven size": (
        lambda r, u: r.tile((u.shape[0], 1)), {"r": r, "u": (UNEVEN, S(0, Padded(3)))},
        S(0, Ragged(8, 4))),
    "a piece by its size": (lambda x: x.repeat(x.shape[0], 1), {"x": x}, REFUSED),
    "repeat by a rank": (lambda r: r.repeat(axis_rank("a") + 1, 1), {"r": r}, OWN),
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
    "parts of Varying by its size": (
        lambda v: v.split(v.shape[1] // 2, 1)[0], {"v": (whole(2, 3, 4), V)}, OWN),
    "parts of R by a size of Varying": (
        lambda r, v: r.split(v.shape[1], 1)[0], {"r": r, "v": (whole(2, 4, 3), V)}, REFUSED),
    "groups of Varying by its size": (
        lambda v, w: F.conv1d(v[None], w, groups=v.shape[0]),
        {"v": (whole(2, 4, 3), V), "w": (whole(4, 1, 2), R)}, OWN),
    # what a rank may ask of its own rows, and what it may not
    "any of a piece": (lambda x: (x > 2).any(), {"x": x}, OWN),
    "all of a piece": (lambda x: (x > 2).all(0), {"x": x}, OWN),
    "all of each row": (lambda x: (x > 2).all(1), {"x": x}, S(0)),
    "a count that is not zero": (lambda x: (x > 2).sum(0) > 0, {"x": x}, OWN),
    "as many as there are": (lambda x: (x > 2).sum() == x.numel(), {"x": x}, OWN),
    "a count above a number": (lambda x: (x > 2).sum(0) > 1, {"x": x}, REFUSED),
    "a sum above zero": (lambda x: x.sum(0) > 0, {"x": x}, REFUSED),
    "any of a sum": (lambda x: x.sum(0).any(), {"x": x}, REFUSED),
    # rows of a piece that a choice of each rank's own made Varying
    "rows where a chosen mask holds": (
        lambda x, m, n: x[torch.where(m[n])[0]],
        {"x": x, "m": (whole(2, 4) > 0, S(1)), "n": (torch.tensor([0, 1]), V)}, OWN),
    "rows where a mask of others holds": (
        lambda x, m, n: x[torch.where(m[n])[0]],
        {"x": x, "m": (whole(2, 3) > 0, R), "n": (torch.tensor([0, 1]), V)}, REFUSED),
    # 5. tensors in slices and integer slots
    "a slice by a number": (
        lambda r, n: r[:n, 1:], {"r": r, "n": (torch.tensor(2), R)}, R),
    "a piece up to a number": (
        lambda x, n: x[:n], {"x": x, "n": (torch.tensor(1), R)}, REFUSED),
    "columns of a piece up to a number": (
        lambda x, n: x[:, :n], {"x": x, "n": (torch.tensor(2), R)}, S(0)),
    "columns up to a float": (
        lambda x, n: x[:, :n], {"x": x, "n": (torch.tensor(2.0), R)}, REFUSED),
    "a slice by Varying": (
        lambda r, n: r[n : n + 2], {"r": r, "n": (torch.tensor([0, 1]), V)}, OWN),
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
    "rows by a list": (lambda x: x[[0, 1]], {"x": x}, REFUSED),
    "rows of a whole dim by a list": (
        lambda x: x[[0, 1]], {"x": (whole(2, 4, 6), S(2))}, S(2)),
    "columns by lists": (lambda x: x[:, [2, 0]], {"x": x}, S(0)),
    "elements by lists": (lambda r: r[[0, 1], [2, 0]], {"r": r}, R),
    "columns by a range": (lambda x: x[:, range(2)], {"x": x}, S(0)),
    "columns by a list of ranks": (
        lambda r: r[:, [axis_rank("a"), 0]], {"r": r}, OWN),
    "rows by an array": (lambda x: x[np.array([0, 1])], {"x": x}, REFUSED),
    "rows by a tuple": (lambda x: x[(0, 1), :], {"x": x}, REFUSED),
    "rows by a range": (lambda x: x[range(2)], {"x": x}, REFUSED),
    "rows by True": (lambda x: x[True], {"x": x}, REFUSED),
    # buffers that are filled in parts
    "a buffer filled by columns": (
        lambda x: filled(x.new_zeros(x.shape[0], 3), x), {"x": x}, S(0)),
    "empty memory filled by columns": (
        lambda x: filled(torch.empty_like(x), x), {"x": x}, S(0)),
    "a buffer filled by sums": (
        lambda p: filled(torch.zeros(4, 3, dtype=p.dtype), p), {"p": p}, P),
    "empty memory filled by sums": (
        lambda p: filled(torch.empty(4, 3, dtype=p.dtype), p), {"p": p}, P),
    "ones filled by sums": (
        lambda p: filled(torch.ones(4, 3, dtype=p.dtype), p), {"p": p}, REFUSED),
    "a buffer filled by what all ranks hold": (
        lambda r: filled(torch.empty(4, 3, dtype=r.dtype), r), {"r": r}, R),
    "a buffer of the whole size filled by pieces": (
        lambda x: filled(torch.zeros(4, 3, dtype=x.dtype), x), {"x": x}, REFUSED),
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


# Other members of the same classes: refused on all ranks, or true in values and types.
x3, heads, one_row = (whole(4, 2, 3), S(0)), (whole(2, 4, 6), S(2)), (whole(2, 3), S(0))
own_number = (torch.tensor([0, 1]), V)
counts = (torch.tensor([1, 2]), P)

OTHERS: dict[str, tuple[Callable[..., Any], dict[str, tuple[Tensor, Any]]]] = {
    # 1. views
    "view(-1, 3) of a flat piece": (lambda x: x.flatten().view(-1, 3), {"x": x}),
    "view(8, -1)": (lambda x: x.view(8, -1), {"x": heads}),
    "reshape(4, -1).sum(0)": (lambda x: x.reshape(4, -1).sum(0), {"x": (ROWS, S(0))}),
    "flatten and unflatten": (
        lambda x: x.flatten(0, 1).unflatten(0, (-1, 4)).sum(1), {"x": (ROWS, S(0))}),
    "view as one row": (lambda x: x.view(1, 4, 3).sum(0), {"x": (ROWS, S(0))}),
    "view_as of another cut": (
        lambda x, y: x.view_as(y), {"x": (whole(2, 6), S(0)), "y": (whole(6, 2), S(1))}),
    "squeeze of one row": (lambda x: x.squeeze(0), {"x": one_row}),
    "squeeze() of one row": (lambda x: x.squeeze(), {"x": one_row}),
    "uneven flatten and back by numbers": (
        lambda x: x.flatten(0, 1).view(-1, 4, 2), {"x": (UNEVEN, S(0, Padded(3)))}),
    # 2. constants
    "zeros_like plus one": (lambda x: (torch.zeros_like(x) + 1).sum(0), {"x": x}),
    "full_like": (lambda x: torch.full_like(x, 2.0).sum(), {"x": x}),
    "new_zeros": (lambda x, b: x.new_zeros(x.shape) + b, {"x": x, "b": b}),
    "empty_like filled": (lambda x: torch.empty_like(x).fill_(2.0).sum(0), {"x": x}),
    "rand_like shape": (lambda x, b: torch.zeros_like(x[:, :1]) * b, {"x": x, "b": b}),
    "zeros_like of Varying": (lambda v: torch.zeros_like(v).sum(), {"v": v}),
    # 3. sizes
    "arange by size": (lambda x: torch.arange(len(x[0])) + x, {"x": x}),
    "linspace": (lambda x: torch.linspace(0, 1, x.shape[0]).sum(), {"x": x}),
    "eye": (lambda x: torch.eye(x.shape[0]).sum(), {"x": x}),
    "prod": (lambda x: x.sum() / math.prod(x.shape), {"x": x}),
    "np.prod": (lambda x: x.sum() / np.prod(x.shape), {"x": x}),
    "size()": (lambda x: x.sum() / x.size()[0], {"x": x}),
    "numel": (lambda x: x.sum() / x.numel(), {"x": x}),
    "ones mask": (lambda x: torch.ones(x.shape[0]).sum(), {"x": x}),
    "narrow by a size": (lambda r, x: r.narrow(0, 0, x.shape[0]), {"r": r, "x": x}),
    "expand by a size": (lambda b, x: b.expand(x.shape[0], 3).mean(0), {"b": b, "x": x}),
    "tile by a size": (lambda b, x: b.tile(x.shape[0], 1), {"b": b, "x": x}),
    "randperm": (lambda r, x: r[torch.randperm(x.shape[0])], {"r": r, "x": x}),
    "tril_indices": (lambda x: torch.tril_indices(x.shape[0], 2), {"x": x}),
    "full of a size": (lambda x: torch.full((2,), x.shape[0]), {"x": x}),
    "tensor of a size": (lambda x: torch.tensor(x.shape[0]), {"x": x}),
    "item of a count": (lambda x: x.sum() / torch.ones(x.shape[0]).sum(), {"x": x}),
    # 4. factors
    "two sizes": (lambda x: x.sum() / (x.shape[0] * x.shape[1]), {"x": x}),
    "size plus size": (lambda x: x.sum() / (x.shape[0] + x.shape[0]), {"x": x}),
    "size shifted": (lambda x: x.sum() / (x.shape[0] << 1), {"x": x}),
    "numel of selected rows": (lambda x: x.sum() / x[x > 0].numel(), {"x": x}),
    "nonzero": (lambda x: x.sum() / (x > 0).nonzero().shape[0], {"x": x}),
    # 5. tensors in slots
    "select": (lambda r, n: r.select(0, n), {"r": r, "n": own_number}),
    "roll": (lambda r, n: r.roll(n, 0), {"r": r, "n": own_number}),
    "topk": (lambda r, n: r.topk(n, 0)[0], {"r": r, "n": own_number}),
    "chunk": (lambda r, n: r.chunk(n + 1)[0], {"r": r, "n": own_number}),
    "tril": (lambda r, n: r.tril(n), {"r": r, "n": own_number}),
    "repeat": (lambda b, n: b.repeat(n + 1), {"b": b, "n": own_number}),
    "expand": (lambda b, n: b.expand(n + 1, 3), {"b": b, "n": own_number}),
    "pad": (lambda r, n: F.pad(r, (n, 0)), {"r": r, "n": own_number}),
    "tensor_split": (lambda r, n: r.tensor_split(n)[0], {"r": r, "n": own_number}),
    "norm": (lambda r, n: r.norm(p=n), {"r": r, "n": own_number}),
    "a slice by a sum": (lambda r, n: r[:n], {"r": r, "n": counts}),
    "a step": (lambda r, n: r[:: n + 1], {"r": r, "n": own_number}),
    "repeat_interleave": (
        lambda b, n: b.repeat_interleave(n + 1), {"b": b, "n": own_number}),
    "rot90": (lambda r, n: r.rot90(n), {"r": r, "n": own_number}),
    "diag": (lambda r, n: r.diagonal(n), {"r": r, "n": own_number}),
    "clamp": (lambda r, n: r.clamp(max=n), {"r": r, "n": own_number}),
    "dropout": (lambda r, n: F.dropout(r, n, True), {"r": r, "n": own_number}),
    "batch eps": (lambda r, n: F.rms_norm(r, (3,), eps=n), {"r": r, "n": own_number}),
    # 6. numpy and odd classes
    "np.int64 in masked_fill": (
        lambda p: p.masked_fill(p > 0, np.int64(3)), {"p": p}),
    "np in fill_": (lambda p: p.fill_(np.float32(3)), {"p": p}),
    "np on the left": (lambda p: np.float64(3) + p, {"p": p}),
    "an array of a Varying": (lambda r, n: r[n.numpy()], {"r": r, "n": own_number}),
    "set by an array": (
        lambda x: with_rows(x, np.array([0, 1]), 0.0), {"x": x}),
    "an array times": (lambda p: p + np.ones(3), {"p": p}),
    "x[...]": (lambda x: x[...], {"x": x}),
    "x[None]": (lambda x: x[None], {"x": x}),
    "x[np.int64(0)]": (lambda x: x[np.int64(0)], {"x": x}),
    "x[False]": (lambda x: x[False], {"x": x}),
    "a slice of numpy": (lambda x: x[:, np.int64(0) : np.int64(2)], {"x": x}),
    "a nested list": (lambda r: r[[[0, 1], [1, 0]]], {"r": r}),
    "amax of a tensor's dim": (lambda x: x.amax(torch.tensor(0)), {"x": x}),
    # 7. one row against a constant
    "one row times ones": (lambda x: x * torch.ones(2, 3), {"x": one_row}),
    "einsum with ones": (
        lambda x: torch.einsum("ij,kj->ik", x, torch.ones(2, 3, dtype=torch.float64)),
        {"x": one_row}),
    "one row against arange": (
        lambda x: x + torch.arange(2)[:, None], {"x": one_row}),
    "where with a constant": (
        lambda x: torch.where(torch.ones(2, 3) > 0, x, 0.0), {"x": one_row}),
    "cat with a constant": (
        lambda x: torch.cat([x, torch.zeros(2, 3, dtype=torch.float64)]), {"x": one_row}),
    # 8. ranks
    "a negative rank": (lambda r: r * -axis_rank("a"), {"r": r}),
    "+rank": (lambda r: r * +axis_rank("a"), {"r": r}),
    "rank // k": (lambda r: r[axis_rank("a") // 1], {"r": r}),
    "min of a rank": (lambda r: r * min(axis_rank("a"), 5), {"r": r}),
    "sum of ranks": (lambda r: r * sum([axis_rank("a"), 1]), {"r": r}),
    "round of a rank": (lambda r: r * round(axis_rank("a") / 2), {"r": r}),
    "rank in add's alpha": (lambda r: r.add(r, alpha=axis_rank("a")), {"r": r}),
    "rank in a size": (lambda r: r.new_zeros(axis_rank("a") + 1), {"r": r}),
    "rank in arange": (lambda r: torch.arange(axis_rank("a") + 1), {"r": r}),
    "rank by np": (lambda r: r * np.float32(2) * axis_rank("a"), {"r": r}),
    "np times rank": (lambda r: r * (np.float32(2) * axis_rank("a")), {"r": r}),
    # 12. orders of arguments
    "where by method keyword": (
        lambda x, b: x.where(condition=x > 0, other=b), {"x": x, "b": b}),
    "F.embedding by keyword": (
        lambda r, i: F.embedding(weight=r, input=i), {"r": r, "i": (IDS, S(0))}),
    "sub by keyword": (lambda p, r: torch.sub(other=p, input=r), {"p": p, "r": r}),
    "linear by keyword": (
        lambda x, w: F.linear(weight=w, input=x), {"x": x, "w": (whole(2, 3), R)}),
    "rsub": (lambda x, b: torch.rsub(x, b), {"x": x, "b": b}),
    "addmm by keyword": (
        lambda r, x: torch.addmm(mat2=x, input=r, mat1=r[:, :2].mT @ r.mT),
        {"r": (whole(3, 3), R), "x": (whole(3, 3), S(1, Padded(3)))}),
    # 14. Partials
    "int of a sum": (lambda p: p.int(), {"p": p}),
    "to(int)": (lambda p: p.to(torch.int32), {"p": p}),
    "bool of a sum": (lambda p: p.bool(), {"p": p}),
    "bernoulli": (lambda p: torch.bernoulli(p.clone().fill_(0.5)), {"p": p}),
    "normal": (lambda p: torch.normal(p, 1.0), {"p": p}),
    "multinomial": (lambda p: torch.multinomial(p, 1), {"p": p}),
    "round": (lambda p: p.round(), {"p": p}),
    "written into integers by slice": (
        lambda p, i: with_rows(i, slice(None), p[:, 0]), {"p": p, "i": (IDS, R)}),
    "half": (lambda i: i.to(torch.int8) * 2, {"i": (IDS, P)}),
    "floor_divide": (lambda p: p // 2, {"p": p}),
    # 15, 16. writes, gradients
    "a cast that is written": (lambda x: x.view(-1).mul_(2).view(-1, 3), {"x": x}),
    # 20. padding through the escape hatch
    "reinterpret of padded rows": (
        lambda v: reinterpret(F.pad(v, (0, 0, axis_rank("a"), 0)), "a", src=V, dst=P),
        {"v": v}),
    # 3 of findings: errors inside
    "scatter with a 0-d index": (
        lambda r: r.flatten().scatter(0, torch.tensor(1), 0.0), {"r": r}),
    "equal by keyword": (
        lambda r: r * float(torch.equal(input=r, other=r)), {"r": r}),
    "equal of sums by keyword": (
        lambda p: p * float(torch.equal(input=p, other=p)), {"p": p}),
    "sdpa of other ranks": (
        lambda q, v: F.scaled_dot_product_attention(q, q, v),
        {"q": (whole(2, 3, 4), R), "v": (whole(3, 4), R)}),
}  # fmt: skip


def with_rows(x: Tensor, rows: Any, values: Any) -> Tensor:
    x = x.clone()
    x[rows] = values
    return x


def same_values(found: Any, expected: Any) -> bool:
    return torch.allclose(found.to(expected.dtype), expected)


@pytest.mark.parametrize("name", OTHERS)
def test_another_line_is_refused_or_true(name: str) -> None:
    line, values = OTHERS[name]
    found = on_ranks(line, values, 2)
    if any(isinstance(each, PlacementError) for each in found):
        assert all(isinstance(each, PlacementError) for each in found), found
        return
    types = [dict(each[1]) for each in found]
    assert all(t == types[0] for t in types)
    if types[0] == {"a": V}:
        return
    expected = line(**{name: value for name, (value, _) in values.items()})
    held = [each[0].detach() for each in found]
    assert same_values(join(held, types[0], {"a": 2}), expected), types[0]
