"""Types through torch ops: one line per case, accepted with its type or refused.

Soundness of the rules is what tests/laws is for; this is what a reader would look
up: what becomes of a placement in this op.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from placements import (
    Even,
    Folded,
    I,
    Index,
    P,
    Padded,
    PlacementError,
    R,
    S,
    V,
    assert_type,
    axis_rank,
    shared_generator,
    type_of,
)
from tests.support.checked import checked_on

N = 4  # ranks on tp


checked = checked_on(tp=N)


def of(t: Any, *shape: int) -> Tensor:
    return assert_type(torch.rand(shape), {"tp": t})


def ids(t: Any, size: int, *shape: int, **index: Any) -> Tensor:
    domain = index.get("index", Index(size))
    return assert_type(torch.zeros(shape, dtype=torch.long), {"tp": t}, index=domain)


def mask(t: Any, *shape: int) -> Tensor:
    return assert_type(torch.zeros(shape, dtype=torch.bool), {"tp": t})


Case = tuple[str, Callable[[], Any], Any]

ACCEPTED: list[Case] = [
    # elementwise
    ("relu S", lambda: of(S(0), 2, 3).relu(), S(0)),
    ("add S R(broadcast)", lambda: of(S(0), 2, 3) + of(R, 3), S(0)),
    ("add S R(one row)", lambda: of(S(0), 2, 3) + of(R, 1, 3), S(0)),
    ("mul V R", lambda: of(V, 2) * of(R, 2), V),
    ("mul V S", lambda: of(V, 2) * of(S(0), 2), V),
    ("compare", lambda: of(S(0), 2) > 0, S(0)),
    ("number minus S", lambda: 1 - of(S(0), 2), S(0)),
    ("neg P", lambda: -of(P, 2), P),
    ("P + P", lambda: of(P, 2) + of(P, 2), P),
    ("P - P", lambda: of(P, 2) - of(P, 2), P),
    ("P * R", lambda: of(P, 2) * of(R, 2), P),
    ("P * number", lambda: of(P, 2) * 3, P),
    ("P / R", lambda: of(P, 2) / of(R, 2), P),
    ("clamp S", lambda: of(S(0), 2).clamp(min=0), S(0)),
    ("where P", lambda: torch.where(mask(R, 2), of(P, 2), 0.0), P),
    ("where S", lambda: torch.where(mask(S(0), 2), of(S(0), 2), of(R, 1)), S(0)),
    ("masked_fill P with 0", lambda: of(P, 2).masked_fill(mask(R, 2), 0), P),
    ("masked_fill S", lambda: of(S(0), 2, 3).masked_fill(mask(S(0), 2, 1), 1.0), S(0)),
    ("I with an integer that is R", lambda: of(I, 2).masked_fill(mask(R, 2), 0), I),
    # along a dim and reductions
    ("softmax -1", lambda: of(S(0), 2, 3).softmax(-1), S(0)),
    ("cumsum", lambda: of(P, 2, 3).cumsum(1), P),
    ("sum over the cut dim", lambda: of(S(0), 2, 3).sum(0), P),
    ("sum over another", lambda: of(S(0), 2, 3).sum(1), S(0)),
    ("sum before it", lambda: of(S(1), 2, 3).sum(0), S(0)),
    ("sum keepdim", lambda: of(S(1), 2, 3).sum(0, keepdim=True), S(1)),
    ("sum of all", lambda: of(S(1), 2, 3).sum(), P),
    ("mean", lambda: of(S(0), 2, 3).mean(1), S(0)),
    ("mean P", lambda: of(P, 2, 3).mean(1), P),
    ("max", lambda: of(S(0), 2, 3).max(1).values, S(0)),
    ("argmax", lambda: of(S(0), 2, 3).argmax(-1), S(0)),
    ("var", lambda: of(S(0), 2, 3).var(1), S(0)),
    ("norm", lambda: of(S(0), 2, 3).norm(2, dim=1), S(0)),
    ("any", lambda: mask(S(0), 2, 3).any(1), S(0)),
    ("prod", lambda: of(S(0), 2, 3).prod(1), S(0)),
    ("topk", lambda: of(S(0), 2, 3).topk(2).indices, S(0)),
    ("sort", lambda: of(S(0), 2, 3).sort(dim=1).values, S(0)),
    ("count_nonzero", lambda: torch.count_nonzero(of(S(0), 2)), P),
    # products
    ("column parallel", lambda: F.linear(of(R, 2, 3), of(S(0), 5, 3)), S(1)),
    ("row parallel", lambda: F.linear(of(S(1), 2, 3), of(S(1), 5, 3)), P),
    ("tokens", lambda: F.linear(of(S(0), 2, 3), of(R, 5, 3), of(R, 5)), S(0)),
    ("row parallel, P bias", lambda: F.linear(of(S(1), 2, 3), of(S(1), 5, 3), of(P, 5)), P),
    ("matmul batch", lambda: of(S(0), 2, 3, 4) @ of(S(0), 2, 4, 5), S(0)),
    ("matmul broadcast batch", lambda: of(S(0), 2, 3, 4) @ of(R, 4, 5), S(0)),
    ("mv", lambda: of(S(0), 2, 3).mv(of(R, 3)), S(0)),
    ("dot", lambda: of(S(0), 3).dot(of(S(0), 3)), P),
    ("bmm", lambda: torch.bmm(of(S(0), 2, 3, 4), of(S(0), 2, 4, 5)), S(0)),
    ("baddbmm", lambda: torch.baddbmm(of(S(0), 2, 3, 5), of(S(0), 2, 3, 4), of(S(0), 2, 4, 5)), S(0)),
    ("einsum contract", lambda: torch.einsum("bld,de->ble", of(S(2), 2, 3, 4), of(S(0), 4, 5)), P),
    ("einsum keep", lambda: torch.einsum("bld,de->ble", of(S(1), 2, 3, 4), of(R, 4, 5)), S(1)),
    ("einsum dots", lambda: torch.einsum("...d,ed->...e", of(S(0), 2, 3, 4), of(R, 5, 4)), S(0)),
    ("P @ R", lambda: of(P, 2, 3) @ of(R, 3, 4), P),
    ("grouped_mm over tp", lambda: grouped(R, S(2)), S(1)),
    ("grouped_mm row parallel", lambda: grouped(S(1), S(1)), P),
    ("grouped_mm own experts", lambda: grouped(V, S(0), V), V),
    ("sdpa heads", lambda: F.scaled_dot_product_attention(*[of(S(1), 2, 2, 3, 4)] * 3), S(1)),
    ("sdpa dropout of a piece", lambda: attention_with_dropout(S(0)), S(0)),
    ("sdpa dropout of R", lambda: attention_with_dropout(R), V),
    # norms and losses
    ("layer_norm", lambda: F.layer_norm(of(S(0), 2, 3), (3,), of(R, 3), of(R, 3)), S(0)),
    ("rms_norm", lambda: F.rms_norm(of(S(0), 2, 3), (3,), of(R, 3)), S(0)),
    ("cross_entropy sum", lambda: F.cross_entropy(of(S(0), 2, 3), ids(S(0), 3, 2), reduction="sum"), P),
    ("cross_entropy none", lambda: F.cross_entropy(of(S(0), 2, 3), ids(S(0), 3, 2), reduction="none"), S(0)),
    ("cross_entropy mean of R", lambda: F.cross_entropy(of(R, 2, 3), ids(R, 3, 2)), R),
    # gathers and scatters
    ("embedding", lambda: F.embedding(ids(S(0), 7, 2), of(R, 7, 3)), S(0)),
    ("embedding, cut features", lambda: F.embedding(ids(R, 7, 2), of(S(1), 7, 3)), S(1)),
    ("gather", lambda: of(S(0), 2, 3).gather(1, ids(S(0), 3, 2, 2)), S(0)),
    ("index_select", lambda: of(S(0), 2, 3).index_select(1, ids(R, 3, 2)), S(0)),
    ("x[ids]", lambda: of(R, 5, 3)[ids(S(0), 5, 2)], S(0)),
    ("x[:, ids]", lambda: of(S(0), 2, 5)[:, ids(R, 5, 3)], S(0)),
    ("x[ids_i, ids_j]", lambda: of(R, 5, 4)[ids(S(0), 5, 2), ids(S(0), 4, 2)], S(0)),
    ("x[mask] of a cut dim", lambda: of(S(0), 2, 3)[mask(S(0), 2)], V),
    ("slice of another dim", lambda: of(S(0), 2, 3)[:, 1:], S(0)),
    ("x[..., 0]", lambda: of(S(0), 2, 3)[..., 0], S(0)),
    ("x[None]", lambda: of(S(0), 2, 3)[None], S(1)),
    ("scatter", lambda: of(S(0), 2, 3).scatter(1, ids(S(0), 3, 2, 1), 1.0), S(0)),
    ("scatter_add", lambda: of(S(0), 2, 3).scatter_add(1, ids(S(0), 3, 2, 1), of(S(0), 2, 1)), S(0)),
    ("index_add spread sources", lambda: torch.zeros(5, 3).index_add(0, ids(S(0), 5, 2), of(S(0), 2, 3)), P),
    ("index_add own rows", lambda: own_rows(), S(0)),
    ("index_add R", lambda: of(R, 5, 3).index_add(0, ids(R, 5, 2), of(R, 2, 3)), R),
    ("index_put", lambda: of(R, 5).index_put((ids(R, 5, 2),), of(R, 2)), R),
    ("bincount", lambda: torch.bincount(ids(S(0), 4, 3), minlength=4), P),
    ("bincount R", lambda: torch.bincount(ids(R, 4, 3)), R),
    ("histc", lambda: torch.histc(of(S(0), 3), bins=4, min=0, max=4), P),
    ("one_hot", lambda: F.one_hot(ids(S(0), 4, 3), 4), S(0)),
    # views
    ("view", lambda: of(S(0), 2, 3, 4).view(2, 12), S(0)),
    ("flatten inner", lambda: of(S(1), 2, 3, 4).flatten(0, 1), S(0, Folded(2, Even(12)))),
    ("flatten outer", lambda: of(S(0), 2, 3, 4).flatten(0, 1), S(0, Even(24))),
    ("flatten uneven", lambda: of(S(1, Padded(9)), 2, 3, 4).reshape(-1, 4), S(0, Folded(2, Padded(9)))),
    ("flatten and back", lambda: of(S(1), 2, 3, 4).flatten(0, 1).unflatten(0, (2, 3)), S(1, Even(12))),
    ("flatten one row", lambda: of(S(1), 2, 1, 4).reshape(-1, 4), S(0, Folded(2, Even(4)))),
    ("flatten no rows", lambda: of(S(1), 2, 0, 4).reshape(-1, 4), S(0, Folded(2, Even(0)))),
    ("transpose", lambda: of(S(0), 2, 3).transpose(0, 1), S(1)),
    (".T", lambda: of(S(0), 2, 3).T, S(1)),
    ("permute", lambda: of(S(0), 2, 3, 4).permute(2, 0, 1), S(1)),
    ("squeeze", lambda: of(S(2), 2, 1, 3).squeeze(1), S(1)),
    ("unsqueeze", lambda: of(S(0), 2, 3).unsqueeze(0), S(1)),
    ("expand", lambda: of(S(1), 1, 3).expand(4, 3), S(1)),
    ("repeat", lambda: of(S(0), 2, 3).repeat(1, 2), S(0)),
    ("repeat of the cut dim", lambda: of(S(0), 2, 3).repeat(3, 1), S(0, Folded(3, Even(8)))),
    ("blocks of what was repeated", lambda: of(S(0), 2, 3).repeat(3, 1).view(3, -1, 3), S(1)),
    ("repeat_interleave", lambda: of(S(0), 2, 3).repeat_interleave(3, dim=0), S(0, Even(24))),
    ("cat", lambda: torch.cat([of(S(0), 2, 3), of(S(0), 2, 1)], 1), S(0)),
    ("cat P", lambda: torch.cat([of(P, 2), of(P, 3)]), P),
    ("stack", lambda: torch.stack([of(S(0), 2), of(S(0), 2)]), S(1)),
    ("split", lambda: of(S(0), 2, 4).split(2, dim=1)[1], S(0)),
    ("chunk", lambda: of(S(0), 2, 4).chunk(2, dim=-1)[0], S(0)),
    ("unbind", lambda: of(S(1), 2, 3).unbind(0)[0], S(0)),
    ("narrow", lambda: of(S(0), 2, 3).narrow(1, 0, 2), S(0)),
    ("select", lambda: of(S(1), 2, 3).select(0, 1), S(0)),
    ("pad another dim", lambda: F.pad(of(S(0), 2, 3), (0, 1)), S(0)),
    ("tril of batches", lambda: of(S(0), 2, 3, 3).tril(), S(0)),
    # copies and casts
    ("to bf16", lambda: of(P, 2).to(torch.bfloat16), P),
    ("type_as", lambda: of(S(0), 2).type_as(of(R, 1)), S(0)),
    ("float of bool", lambda: mask(S(0), 2).float(), S(0)),
    # random
    ("dropout S", lambda: F.dropout(of(S(0), 2), 0.5), S(0)),
    ("dropout R", lambda: F.dropout(of(R, 2), 0.5), V),
    ("dropout in eval", lambda: F.dropout(of(I, 2), 0.5, training=False), I),
    ("probabilities that are cut alike", lambda: of(S(0), 2, 3).bernoulli_(of(S(0), 2, 3)), S(0)),
    ("one probability", lambda: of(S(0), 2, 3).bernoulli(of(R)), S(0)),
    ("nonzero as a tuple", lambda: of(R, 2, 3).nonzero(as_tuple=True)[1], R),
    ("empty_like(x=)", lambda: torch.empty_like(x=of(S(0), 2, 3)), S(0)),
    ("rand_like", lambda: torch.rand_like(of(S(0), 2)) * of(S(0), 2), S(0)),
]  # fmt: skip


def attention_with_dropout(t: Any) -> Tensor:
    q, k, v = (of(t, 2, 2, 3, 4) for _ in range(3))
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


def grouped(rows: Any, weights: Any, ends: Any = R) -> Tensor:
    offs = assert_type(torch.tensor([4, 8], dtype=torch.int32), {"tp": ends})
    return torch._grouped_mm(
        of(rows, 8, 16).bfloat16(), of(weights, 2, 16, 8).bfloat16(), offs=offs
    )


def own_rows() -> Tensor:
    target = of(S(0, Padded(9)), 3, 2)
    index = ids(S(0), 0, 4, index=Index(Padded(9).over(N), "tp"))
    return target.index_add(0, index, of(S(0), 4, 2))


@pytest.mark.parametrize(
    ("program", "expected"), [c[1:] for c in ACCEPTED], ids=[c[0] for c in ACCEPTED]
)
def test_the_result_has_the_type(program: Callable[[], Any], expected: Any) -> None:
    assert type_of(program()) == {"tp": expected}


REFUSED: list[Case] = [
    ("S with a whole R", lambda: of(S(0), 2, 3) + of(R, 2, 3), "holds all of it"),
    ("S(0) with S(1)", lambda: of(S(0), 3, 3) + of(S(1), 3, 3), "two different dims"),
    ("other extents", lambda: of(S(0, Padded(9)), 3) + of(S(0), 3), "differ in their lengths"),
    ("one row here is not broadcast", lambda: of(S(0), 1, 3) * of(R, 4, 3), "holds all of it"),
    ("P * P", lambda: of(P, 2) * of(P, 2), "product of two sums"),
    ("P * V", lambda: of(P, 2) * of(V, 2), "differs by rank"),
    ("R / P", lambda: of(R, 2) / of(P, 2), "pending a sum is wrong"),
    ("P + number", lambda: of(P, 2) + 10, "constant added"),
    ("number - P", lambda: 1 - of(P, 2), "constant added"),
    ("1 / P", lambda: 1 / of(P, 2), "non-linear"),
    ("P floor divided", lambda: torch.div(of(P, 2), 2, rounding_mode="floor"), "non-linear"),
    ("masked_fill P with a number", lambda: of(P, 2).masked_fill(mask(R, 2), 1.0), "constant added"),
    ("masked_fill P by a mask of its own", lambda: of(P, 2).masked_fill(mask(V, 2), 0), "chosen or divided"),
    ("I + R", lambda: of(I, 2) + of(R, 2), "Invariant mixes"),
    ("I masked by V", lambda: of(I, 2).masked_fill(mask(V, 2), 0), "Invariant mixes"),
    ("I @ S", lambda: of(I, 2, 3) @ of(S(1), 3, 4), "Invariant mixes"),
    ("softmax of P", lambda: of(P, 2, 3).softmax(-1), "non-linear"),
    ("softmax over the cut dim", lambda: of(S(1), 2, 3).softmax(-1), "needs the whole dim"),
    ("max over the cut dim", lambda: of(S(1), 2, 3).max(1), "largest of a piece"),
    ("norm over the cut dim", lambda: of(S(0), 2, 3).norm(), "norm of a piece"),
    ("var over the cut dim", lambda: of(S(0), 2, 3).var(0), "whole dim"),
    ("prod over the cut dim", lambda: of(S(0), 2, 3).prod(0), "Partial means sum"),
    ("cumsum over the cut dim", lambda: of(S(0), 2).cumsum(0), "what came before"),
    ("sort over the cut dim", lambda: of(S(0), 2).sort(), "order of the whole dim"),
    ("topk over the cut dim", lambda: of(S(1), 2, 3).topk(1), "order of the whole dim"),
    ("half a contraction", lambda: of(S(1), 2, 3) @ of(R, 3, 4), "both operands cut"),
    ("R bias on P", lambda: F.linear(of(S(1), 2, 3), of(S(1), 5, 3), of(R, 5)), "counted once"),
    ("baddbmm R + P", lambda: torch.baddbmm(of(R, 2, 3, 5), of(S(2), 2, 3, 4), of(S(1), 2, 4, 5)), "counted once"),
    ("grouped_mm of replicated rows", lambda: grouped(R, S(0)), "rows of those groups"),
    ("layer_norm over the cut dim", lambda: F.layer_norm(of(S(1), 2, 3), (3,)), "statistics of a piece"),
    ("cross_entropy over cut classes", lambda: F.cross_entropy(of(S(1), 2, 3), ids(R, 3, 2)), "all classes"),
    ("cross_entropy mean of cut rows", lambda: F.cross_entropy(of(S(0), 2, 3), ids(S(0), 3, 2)), "global_mean"),
    ("gather along the cut dim", lambda: of(S(0), 2, 3).gather(0, ids(S(0), 8, 2, 3)), "spread over"),
    ("embedding of a cut vocabulary", lambda: F.embedding(ids(R, 8, 3), of(S(0), 2, 3)), "spread over"),
    ("global ids into local experts", lambda: of(S(0), 2, 3)[ids(V, 8, 5)], "spread over"),
    ("own rows into a whole dim", lambda: of(R, 8, 3)[ids(S(0), 0, 2, index=Index(Even(8, N), "tp"))], "holds all rows"),
    ("scatter of spread positions", lambda: torch.zeros(5, 3).index_copy(0, ids(S(0), 5, 2), of(S(0), 2, 3)), "positions written"),
    ("slice of the cut dim", lambda: of(S(0), 2, 3)[1:], "rank's piece"),
    ("row of the cut dim", lambda: of(S(0), 2, 3)[0], "rank's piece"),
    ("cat along the cut dim", lambda: torch.cat([of(S(0), 2), of(S(0), 2)]), "interleaves"),
    ("chunk of the cut dim", lambda: of(S(0), 2, 3).chunk(2), "rank's piece"),
    ("repeat by the size of a piece", lambda: (x := of(S(0), 2)).repeat(x.shape[0]), "interleaves"),
    ("flip of the cut dim", lambda: of(S(0), 2).flip(0), "each piece only"),
    ("squeeze of one row of many", lambda: of(S(0), 1, 3).squeeze(0), "other ranks hold"),
    ("tril of a cut dim", lambda: of(S(0), 3, 3).tril(), "place in the whole"),
    ("pad of the cut dim", lambda: F.pad(of(S(0), 3), (0, 1)), "between the ranks' rows"),
    ("view that tears the cut dim", lambda: of(S(1), 2, 6).reshape(-1).view(3, 4), "cannot be said"),
    ("P to int", lambda: of(P, 2).long(), "non-linear"),
    ("bincount without a length", lambda: torch.bincount(ids(S(0), 4, 3)), "minlength"),
    ("one_hot without a width", lambda: F.one_hot(ids(S(0), 4, 3)), "num_classes"),
    ("dropout of I", lambda: F.dropout(of(I, 2), 0.5), "shared generator"),
    ("sdpa dropout of I", lambda: attention_with_dropout(I), "shared generator"),
    ("a flag that differs by rank",
     lambda: torch.ops.aten.sum(of(R, 2, 3), [0], axis_rank("tp")), "belongs to an axis"),
    ("a probability that is a summand", lambda: of(R, 2).bernoulli_(of(P, 2)), "sum of draws"),
    ("a probability of other rows", lambda: of(S(0), 2, 2).bernoulli_(of(S(1), 2, 2)), "two different dims"),
    ("expand names one size of uneven pieces", lambda: of(S(0, Padded(7)), 2, 3).expand(2, 3), "a different number of rows"),
    ("-1 beside a size that is zero on a rank",
     lambda: (x := of(S(0, Padded(3)), 1, 4)).view(x.shape[0], -1), "what -1 is beside"),
    ("a constant in the sizes of an uneven piece",
     lambda: of(R, 3).scatter_add(0, ids(S(0, Padded(7)), 3, 2), torch.ones(2)), "Replicate"),
    ("dropout of P", lambda: F.dropout(of(P, 2), 0.5), "no longer one sum"),
    ("item of P", lambda: of(P).item(), "one summand"),
    ("if P", lambda: bool(of(P)), "one summand"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("program", "says"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_it_is_refused(program: Callable[[], Any], says: str) -> None:
    with pytest.raises(PlacementError, match=says):
        program()


def test_ranks_that_share_a_generator_draw_alike() -> None:
    with shared_generator("tp"):
        assert type_of(F.dropout(of(R, 2), 0.5)) == {"tp": R}
        assert type_of(F.dropout(of(I, 2), 0.5)) == {"tp": I}
        assert type_of(F.dropout(of(P, 2), 0.5)) == {"tp": P}
        assert type_of(attention_with_dropout(R)) == {"tp": R}
        assert type_of(torch.rand(3)) == {"tp": R}
        for t in (V, S(0)):
            with pytest.raises(PlacementError, match="draw the same numbers"):
                F.dropout(of(t, 2), 0.5)
    assert type_of(torch.rand(3)) == {"tp": V}


def test_a_shape_error_is_left_to_torch() -> None:
    with pytest.raises(RuntimeError, match="must match"):
        of(R, 2) + of(R, 3)
