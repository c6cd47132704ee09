"""Arguments of torch ops, however they are passed: what is refused and what is accepted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from placements import (
    I,
    Index,
    P,
    PlacementError,
    R,
    S,
    assert_type,
    axis_rank,
    type_of,
)
from placements._torch import unseen
from placements.runtime.state import suspended
from tests.support.checked import checked_on
from tests.support.checked import ones_of as of

checked = checked_on(tp=2)


def ids(t: Any, size: int, *shape: int) -> Tensor:
    zeros = torch.zeros(shape, dtype=torch.long)
    return assert_type(zeros, {"tp": t}, index=Index(size))


INT = torch.int64

REFUSED: dict[str, Callable[[], Any]] = {
    "integer R + integer P": lambda: of(R, 3, dtype=INT) + torch.bincount(ids(S(0), 3, 4), minlength=3),
    "float P + integer R": lambda: of(P, 3) + of(R, 3, dtype=INT),
    "integer P - integer I": lambda: of(P, 3, dtype=INT) - of(I, 3, dtype=INT),
    "scatter_add of pieces to an integer R": lambda: of(R, 3, dtype=INT).scatter_add(0, ids(S(0), 3, 4), of(S(0), 4, dtype=INT)),
    "cat of integer P and R": lambda: torch.cat([of(P, 3, dtype=INT), of(R, 3, dtype=INT)]),
    "P + (zeros + 1)": lambda: of(P, 3) + (torch.zeros(3) + 1),
    "P + zeros that were changed": lambda: of(P, 3) + torch.zeros(3).add_(1),
    "bias of zeros + 1": lambda: F.linear(of(S(1), 2, 3), of(S(1), 4, 3), torch.zeros(4) + 1),
    "P + where(fresh)": lambda: of(P, 3) + torch.where(torch.zeros(3, dtype=torch.bool), 0.0, 1.0),
    "number by keyword": lambda: torch.add(of(P, 3), other=1.0),
    "axis= of cat": lambda: torch.cat([of(S(1), 2, 3)] * 2, axis=1),
    "axis= of chunk": lambda: of(S(1), 2, 4).chunk(2, axis=1),
    "axis= of sort": lambda: torch.sort(of(S(1), 2, 3), axis=1),
    "out=": lambda: torch.matmul(of(S(1), 2, 3), of(S(0), 3, 2), out=of(R, 2, 2)),
    "dropout in place on R": lambda: F.dropout(of(R, 3), 0.5, True, inplace=True),
    "copy of one row over many": lambda: torch.empty(2, 3).copy_(of(S(0), 1, 3)),
    "bias with more dims than the product": lambda: F.linear(of(R, 3), of(S(0), 2, 3), of(S(1), 1, 2)),
    "full of a tensor": lambda: torch.full((3,), of(P).detach()),
    "arange of a tensor": lambda: torch.arange(of(P)),
    "multinomial of cut probabilities": lambda: torch.multinomial(of(S(1), 2, 3), 1),
    "legacy loss arguments": lambda: F.mse_loss(of(S(0), 3), of(S(0), 3), size_average=True),
    "seed of ones for a Replicate": lambda: of(R, 3).requires_grad_().sum().backward(torch.ones(())),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_it_is_refused(name: str) -> None:
    with pytest.raises(PlacementError):
        REFUSED[name]()


ACCEPTED: dict[str, tuple[Callable[[], Any], Any]] = {
    "==": (lambda: of(S(0), 3) == of(S(0), 3), S(0)),
    "&=": (lambda: (of(S(0), 3) > 0).__iand__(of(S(0), 3) > 1), S(0)),
    "axis= of another dim": (lambda: of(S(0), 2, 3).cumsum(axis=1), S(0)),
    "keepdims=": (lambda: of(S(2), 2, 3, 4).sum(1, keepdims=True), S(2)),
    "std with unbiased by position": (lambda: of(S(1), 4, 3).std(0, True), S(0)),
    "integer before an index": (lambda: of(S(1), 3, 4, 3)[0, :, ids(R, 3, 2)], S(0)),
    "sum of ones like a piece": (lambda: torch.ones_like(of(S(0), 3)).sum(), P),
    "copy to a fresh buffer": (lambda: torch.empty(3, 2).copy_(of(S(0), 2)), S(1)),
    "mask of one row and one head": (
        lambda: F.scaled_dot_product_attention(
            *[of(S(1), 2, 2, 3, 4)] * 3, attn_mask=of(R, 1, 1, 3, 3)
        ),
        S(1),
    ),
    "positions of a longer table": (lambda: F.embedding(torch.arange(3), of(R, 9, 2)), R),
    "a bias for a row-parallel linear": (
        lambda: F.linear(of(S(1), 2, 3), of(S(1), 4, 3), torch.zeros(4)),
        P,
    ),
}


@pytest.mark.parametrize("name", list(ACCEPTED))
def test_it_is_accepted(name: str) -> None:
    program, expected = ACCEPTED[name]
    assert type_of(program()) == {"tp": expected}


def test_torch_says_what_is_wrong_with_its_arguments() -> None:
    for program, error in (
        (lambda: of(R, 3)[0, 0, 0], IndexError),
        (lambda: of(R).unbind(), IndexError),
        (lambda: torch.cat([]), (RuntimeError, ValueError)),
        (lambda: of(R, 2, 2).permute(0, 0), RuntimeError),
        (lambda: torch.einsum("ij,jk", of(R, 2, 2)), (RuntimeError, ValueError)),
    ):
        with pytest.raises(error):
            program()


def test_the_bias_of_a_row_parallel_linear_is_named() -> None:
    x, w, bias = of(S(1), 2, 3), of(S(1), 4, 3), of(R, 4)
    with pytest.raises(
        PlacementError, match="bias is Replicate on axis 'tp', expected Partial"
    ):
        F.linear(x, w, bias)


def test_modules_may_be_built_inside() -> None:
    assert nn.Linear(2, 2).weight.shape == (2, 2)
    assert nn.Embedding(3, 2).weight.shape == (3, 2)


ROUNDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda p: p.sum(dtype=torch.int64),
    "sum along": lambda p: torch.sum(p, 0, dtype=torch.int32),
    "cumsum": lambda p: p.cumsum(0, dtype=torch.int64),
    "to": lambda p: p.to(torch.int64),
    "long": lambda p: p.long(),
    "type": lambda p: p.type(torch.int64),
    "copy_": lambda p: torch.empty(4, dtype=torch.int64).copy_(p),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_summands_are_not_rounded(name: str) -> None:
    p = of(P, 4)
    with pytest.raises(PlacementError) as caught:
        ROUNDS[name](p)
    assert caught.value.name == "p" or name == "copy_"
    ROUNDS[name](of(R, 4))
    whole = assert_type(torch.ones(4, dtype=torch.int32), {"tp": P})
    assert type_of(whole.sum(dtype=torch.int64)) == {"tp": P}
    assert type_of(of(P, 4).sum(dtype=torch.float64)) == {"tp": P}
    assert type_of(of(S(0), 4).sum(dtype=torch.int64)) == {"tp": P}


# A call with a number that knows its axis beside a float of which the memo keeps only
# whether it is 0: the second call must not be given the float of the first one.
FLOATS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "full": lambda x, v: torch.full((x.shape[0], 2), v),
    "new_full": lambda x, v: x.new_full((x.shape[0], 2), v),
    "arange": lambda x, v: torch.arange(axis_rank("tp"), v),
    "pad": lambda x, v: F.pad(of(R, 2), (0, axis_rank("tp") + 1), "constant", v),
    "pad of a piece": lambda x, v: F.pad(x, (0, x.shape[0]), "constant", v),
    "full_like": lambda x, v: torch.full_like(x[:, : x.shape[1]], v),
    "masked_fill": lambda x, v: x.view(x.shape[0], -1).masked_fill(of(S(0), 2, 3) > 0, v),
}


@pytest.mark.parametrize("name", FLOATS)
def test_the_memo_keeps_no_float_of_another_call(name: str) -> None:
    x = of(S(0), 2, 3)
    for v in (2.5, 3.5, 2.5):
        found = FLOATS[name](x, v)
        with suspended(), unseen():
            numbers = found.flatten().tolist()
            if name == "arange":
                assert numbers == torch.arange(0, v).tolist()
            else:
                assert v in numbers
