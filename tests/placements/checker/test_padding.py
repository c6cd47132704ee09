"""Rows of padding are never summed, counted, looked at, sent or given a gradient."""

from collections.abc import Callable
from typing import Annotated

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Bool, Float
from torch import Tensor

from placements import (
    I,
    On,
    P,
    PadRows,
    PlacementError,
    R,
    S,
    V,
    all_gather,
    all_reduce,
    all_to_all,
    assert_type,
    convert,
    pad_rows,
    region,
    reinterpret,
    set_current_mesh,
    type_of,
    typed,
)
from placements.runtime.state import suspended
from tests.support.checked import checked_on

N, T, D, E, K = 5, 8, 4, 6, 2


checked = checked_on(tp=2)


def tokens() -> tuple[Tensor, Tensor]:
    return pad_rows(assert_type(torch.randn(N, D), {"tp": R}), 0, to=T)


def routed() -> tuple[Tensor, Tensor, Tensor]:
    """Logits and expert ids of padded tokens, and the mask of the tokens."""
    x_TD, valid_T = tokens()
    w_ED = assert_type(torch.randn(E, D), {"tp": R})
    logits_TE = F.linear(x_TD, w_ED, assert_type(torch.randn(E), {"tp": R}))
    return logits_TE, logits_TE.topk(K, -1).indices, valid_T


def pads_of(x: Tensor) -> list[str]:
    known = type_of(x)
    assert known is not None
    return [str(pads) for pads in known.pads]


# --- what makes them


def test_pad_rows_appends_zeros_and_says_so() -> None:
    x = assert_type(torch.randn(2, 3, 4), {"tp": S(2)})
    padded, valid = pad_rows(x, 1, to=5)
    assert pads_of(padded) == ["padded with 0 in dim 1 (first 3 valid)"]
    assert type_of(padded) == {"tp": S(2)} and type_of(valid) == {"tp": R}
    assert padded.shape == (2, 5, 4)
    assert pads_of(padded.narrow(1, 0, 3)) == pads_of(padded[:, :3]) == []


def test_with_checking_off_it_pads_and_masks() -> None:
    with suspended():
        padded, valid = pad_rows(torch.ones(2, 3), -1, to=4)
        assert padded.tolist() == [[1, 1, 1, 0]] * 2 and valid.tolist() == [1, 1, 1, 0]


def test_arguments_of_pad_rows() -> None:
    x = assert_type(torch.randn(N, D), {"tp": R})
    with pytest.raises(ValueError, match="to=3, must be at least the 5 rows"):
        pad_rows(x, 0, to=3)
    with pytest.raises(PlacementError, match="pad before the dim is cut"):
        pad_rows(assert_type(torch.randn(4, D), {"tp": S(0)}), 0, to=8)
    with pytest.raises(PlacementError, match="expected no rows of padding"):
        pad_rows(tokens()[0], 0, to=16)


def test_data_that_arrives_padded_is_declared_with_its_mask() -> None:
    valid = assert_type(torch.rand(2, 3) > 0.5, {"tp": R})
    x = assert_type(torch.randn(2, 3, D), {"tp": R}, valid=valid)
    ids = assert_type(torch.randint(5, (2, 3)), {"tp": R}, valid=valid)
    with pytest.raises(PlacementError, match="padded in dim 0, 1"):
        x.sum((0, 1))
    # flattened, it is the same mask
    rows, flat = x.flatten(0, 1), valid.flatten()
    assert type_of(torch.where(flat[:, None], rows, 0).sum(0)) == {"tp": R}
    assert pads_of(rows[flat]) == [] == pads_of(ids[valid])
    assert type_of((x * valid[..., None]).sum(1)) == {"tp": R}


def test_a_mask_must_fit() -> None:
    x = torch.randn(4, D)
    for mask, said in (
        (assert_type(torch.ones(3) > 0, {"tp": R}), "shape of the first dims"),
        (assert_type(torch.ones(4), {"tp": R}), "must be bools"),
        (assert_type(torch.ones(4) > 0, {"tp": S(0)}), "cut as x is"),
    ):
        with pytest.raises(ValueError, match=said):
            assert_type(x, {"tp": R}, valid=mask)


# --- B33: statistics over padded rows

WRONG: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "counts": lambda logits, ids, valid: F.one_hot(ids, E).sum((0, 1)),
    "counts of ids": lambda logits, ids, valid: torch.bincount(ids.flatten(), minlength=E),
    "counts in bins": lambda logits, ids, valid: torch.histc(ids.flatten().float(), E, 0, E),
    "a routing map": lambda logits, ids, valid: torch.zeros(T, E).scatter(1, ids, 1.0).sum(0),
    "mean of probs": lambda logits, ids, valid: logits.softmax(-1).mean(0),
    "z-loss": lambda logits, ids, valid: logits.logsumexp(-1).square().mean(),
    "z-loss as a sum": lambda logits, ids, valid: logits.logsumexp(-1).square().sum(),
    "expert bias": lambda logits, ids, valid: logits.sigmoid().amax(0),
    "order of slots": lambda logits, ids, valid: ids.flatten().argsort(),
    "cross entropy": lambda logits, ids, valid: F.cross_entropy(logits, ids[:, 0]),
    "cross entropy, summed": lambda logits, ids, valid: F.cross_entropy(
        logits, ids[:, 0], reduction="sum"
    ),
    "other classes ignored": lambda logits, ids, valid: F.cross_entropy(
        logits, torch.where(valid, ids[:, 0], -1)
    ),
    "a loss of zeros": lambda logits, ids, valid: F.binary_cross_entropy_with_logits(
        logits * valid[:, None], logits * valid[:, None], reduction="sum"
    ),
    "one path unmasked": lambda logits, ids, valid: (
        torch.where(valid[:, None], logits, 0) + logits.softmax(-1)
    ).sum(0),
    "the mask along the wrong axis": lambda logits, ids, valid: (
        (logits @ logits.T) * valid
    ).sum(0),
    "a rolled mask": lambda logits, ids, valid: valid.roll(1, 0),
    "rolled rows": lambda logits, ids, valid: logits.roll(-1, 0),
    "the mask turned round": lambda logits, ids, valid: logits.masked_fill(
        valid[:, None], 0
    ).sum(0),
    "branches exchanged": lambda logits, ids, valid: torch.where(
        valid[:, None], 0, logits
    ).sum(0),
    "a softmax over tokens": lambda logits, ids, valid: logits.softmax(0),
    "too many rows": lambda logits, ids, valid: logits[: N + 1].sum(0),
    "one row": lambda logits, ids, valid: logits[-1],
    "rows by an index": lambda logits, ids, valid: logits[
        assert_type(torch.arange(T), {"tp": R})
    ],
    "joined rows": lambda logits, ids, valid: torch.cat([logits, logits]),
    "zero over zero": lambda logits, ids, valid: (
        (logits * valid[:, None]) / (logits * valid[:, None])
    ).sum(0),
    "read as a number": lambda logits, ids, valid: logits.tolist(),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_padding_that_counts_is_refused(name: str) -> None:
    with pytest.raises(PlacementError, match=r"padded|rows of padding"):
        WRONG[name](*routed())


RIGHT: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "counts": lambda logits, ids, valid: (F.one_hot(ids, E) * valid[:, None, None]).sum((0, 1)),
    "counts of valid ids": lambda logits, ids, valid: torch.bincount(
        ids[valid].flatten(), minlength=E
    ),
    "counts by weight": lambda logits, ids, valid: torch.bincount(
        ids.flatten(), valid.repeat_interleave(K).float(), minlength=E
    ),
    "a masked routing map": lambda logits, ids, valid: (
        torch.zeros(T, E, dtype=torch.bool).scatter(1, ids, True) & valid[:, None]
    ).sum(0),
    "mean of probs": lambda logits, ids, valid: logits.softmax(-1)[valid].mean(0),
    "mean by mask": lambda logits, ids, valid: (
        torch.where(valid[:, None], logits.softmax(-1), 0).sum(0) / valid.sum()
    ),
    "z-loss": lambda logits, ids, valid: (
        logits.logsumexp(-1).square().masked_fill(~valid, 0).sum() / valid.sum()
    ),
    "cross entropy": lambda logits, ids, valid: (
        F.cross_entropy(logits, ids[:, 0], reduction="none") * valid
    ).sum(),
    "classes that are ignored": lambda logits, ids, valid: F.cross_entropy(
        logits.exp(), torch.where(valid, ids[:, 0], -100)
    ),
    "first rows": lambda logits, ids, valid: logits[:N].amax(0),
    "slots": lambda logits, ids, valid: ids.flatten()[valid.repeat_interleave(K)].argsort(),
    "slots of an expanded mask": lambda logits, ids, valid: ids.flatten()[
        valid[:, None].expand(T, K).flatten()
    ],
    "a product with zeros": lambda logits, ids, valid: (logits * valid[:, None]).T @ logits,
    "silu keeps zeros": lambda logits, ids, valid: F.silu(logits * valid[:, None]).sum(0),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_padding_that_does_not_count_is_accepted(name: str) -> None:
    result = RIGHT[name](*routed())
    assert type_of(result) == {"tp": R} and pads_of(result) == []


def test_the_mask_of_another_batch_does_not_help() -> None:
    masks = [assert_type(torch.rand(T) > 0.5, {"tp": R}) for _ in range(2)]
    x, y = (assert_type(torch.randn(T, D), {"tp": R}, valid=mask) for mask in masks)
    assert type_of((x * masks[0][:, None]).sum(0)) == {"tp": R}
    with pytest.raises(PlacementError, match="padded in dim 0"):
        (x * masks[1][:, None]).sum(0)
    with pytest.raises(PlacementError, match="padded in dim 0"):
        torch.where(masks[0][:, None], x + y, 0).sum(0)


def test_tensors_padded_from_equally_many_rows_share_their_mask() -> None:
    x, valid = tokens()
    targets, _ = pad_rows(assert_type(torch.randn(N), {"tp": R}), 0, to=T)
    losses = (x.exp().sum(1) - targets).square()
    assert type_of((losses * valid).sum()) == {"tp": R}
    other, _ = pad_rows(assert_type(torch.randn(N + 1), {"tp": R}), 0, to=T)
    with pytest.raises(PlacementError, match="first 6 valid"):
        ((losses - other) * valid).sum()


# --- B45: pad to the degree, cut, route, gather, trim


def test_fewer_tokens_than_ranks() -> None:
    x_LD = assert_type(torch.randn(1, D), {"tp": R})
    padded, valid = pad_rows(x_LD, 0, to=2)
    x_TD = convert(padded, "tp", src=R, dst=S(0))
    valid_T = convert(valid, "tp", src=R, dst=S(0))
    probs = x_TD.softmax(-1)
    with pytest.raises(PlacementError, match="summed or counted"):
        probs.sum(0)
    assert type_of(torch.where(valid_T[:, None], probs, 0).sum(0)) == {"tp": P}
    back = all_gather(probs, "tp", src=S(0), dst=R)
    assert pads_of(back) != [] and pads_of(back[:1]) == []
    with pytest.raises(PlacementError, match="rows of padding would be sent"):
        own = reinterpret(probs, "tp", src=S(0), dst=V)
        sizes = [1, 0]
        all_to_all(
            own, "tp", src=V, dst=V, input_split_sizes=sizes, output_split_sizes=sizes
        )


def test_pieces_that_are_cut_in_other_ways_have_other_masks() -> None:
    """Even and folded pieces are equally long; only the cut tells their masks apart."""
    from placements import Even, Folded

    x, valid = pad_rows(assert_type(torch.randn(N, D), {"tp": R}), 0, to=T)
    cut, folded = S(0, Even(T)), S(0, Folded(2, Even(T // 2)))
    own = reinterpret(convert(x.exp(), "tp", src=R, dst=cut), "tp", src=cut, dst=V)
    for shard, fits in ((cut, True), (folded, False)):
        mask = reinterpret(convert(valid, "tp", src=R, dst=shard), "tp", src=shard, dst=V)
        if fits:
            assert type_of((own * mask[:, None]).sum(0)) == {"tp": V}
            continue
        with pytest.raises(PlacementError, match="padded in dim 0"):
            (own * mask[:, None]).sum(0)


def test_a_sum_over_ranks_keeps_the_padding() -> None:
    x, _ = tokens()
    partial = convert(x.exp(), "tp", src=R, dst=P)
    assert pads_of(all_reduce(partial, "tp", src=P, dst=I)) == pads_of(partial) != []


# --- boundaries


@typed
def plain(x_TD: Annotated[Float[Tensor, "T D"], On(tp=R)]) -> Tensor:
    return x_TD[:1]


@typed
def masked_sum(
    x_TD: Annotated[Float[Tensor, "T D"], On(tp=R), PadRows],
    valid_T: Annotated[Bool[Tensor, " T"], PadRows],
) -> Annotated[Float[Tensor, " D"], On(tp=R)]:
    return torch.where(valid_T[:, None], x_TD, 0).sum(0)


def test_an_argument_has_no_padding_unless_the_annotation_says_so() -> None:
    x_TD, valid_T = tokens()
    with pytest.raises(PlacementError, match="x_TD has padded with 0 in dim 0") as caught:
        plain(x_TD)
    assert caught.value.expected == "no rows of padding"
    assert type_of(masked_sum(x_TD.exp(), valid_T)) == {"tp": R}


def test_a_result_has_none_either() -> None:
    @typed
    def forgets(x_TD: Annotated[Float[Tensor, "T D"], PadRows]) -> Float[Tensor, "T D"]:
        return x_TD.exp()

    with pytest.raises(PlacementError, match="return has padded"):
        forgets(tokens()[0])


def test_opaque_code_takes_none() -> None:
    double = region(lambda x: x * 2, ins=[{"tp": R}], grads=[{"tp": P}], outs={"tp": R})
    with pytest.raises(PlacementError, match="expected no rows of padding"):
        double(tokens()[0])


def test_the_layer_refuses_padded_tokens_at_its_entrance() -> None:
    from spmd_moe import MoE, MoEConfig, Parallel

    with set_current_mesh({"dp": 1}):
        moe = MoE(MoEConfig(dim=D, hidden_dim=8, num_experts=4, top_k=2), Parallel())
        x_BLD, _ = pad_rows(torch.randn(1, 3, D), 1, to=4)
        with pytest.raises(PlacementError, match="expected no rows of padding"):
            moe(x_BLD, seq_len=4)


# --- in place, views, gradients, errors


def test_in_place_ops_change_nothing_that_is_known() -> None:
    x, valid = tokens()
    with pytest.raises(PlacementError, match="in-place op cannot change"):
        x.add_(1)
    x.mul_(2)
    y = x.exp()
    y.masked_fill_(~valid[:, None], 0)
    assert pads_of(y) == ["padded in dim 0 (first 5 valid)"]
    with pytest.raises(PlacementError, match="in-place op cannot change"):
        assert_type(torch.randn(T, D), {"tp": R}).add_(x)


def test_views_carry_the_padding() -> None:
    x = assert_type(torch.randn(2, 3, D), {"tp": R})
    padded, valid = pad_rows(x, 1, to=4)
    moved = padded.exp().transpose(0, 1)
    assert pads_of(moved) == ["padded in dim 0 (first 3 valid)"]
    assert type_of((moved * valid[:, None, None]).sum(0)) == {"tp": R}
    flat = padded.exp().flatten(0, 1)
    repeated = valid[None].expand(2, 4).flatten()
    assert type_of((flat * repeated[:, None]).sum(0)) == {"tp": R}
    again = flat.unflatten(0, (2, 4))
    assert pads_of(again) == ["padded in dim 1 (first 3 valid)"]
    with pytest.raises(PlacementError, match="mixes rows of padding"):
        padded.reshape(4, 2, D)


def test_of_nothing_nothing_is_known() -> None:
    """What the deep run of the padding law found."""
    empty = assert_type(torch.randn(0, D), {"tp": R})
    padded, _ = pad_rows(empty, 1, to=D + 2)
    assert pads_of(padded.sum(0)) == [f"padded with 0 in dim 0 (first {D} valid)"]
    assert pads_of(padded.mean(0)) == [f"padded in dim 0 (first {D} valid)"]
    rows, _ = pad_rows(assert_type(torch.randn(1, 2, 0), {"tp": R}), 0, to=2)
    with pytest.raises(PlacementError, match="mixes rows of padding"):
        rows.reshape(0)
    ids, _ = pad_rows(assert_type(torch.tensor([3, 1]), {"tp": R}), 0, to=4)
    assert F.one_hot(ids, 4).shape == (4, 4)
    with pytest.raises(PlacementError, match="without num_classes="):
        F.one_hot(ids)


def test_rows_of_padding_get_no_gradient() -> None:
    valid = assert_type(torch.arange(T) < N, {"tp": I})
    leaf = torch.randn(T, D, requires_grad=True)
    x = assert_type(leaf, {"tp": I}, valid=valid)
    weight = assert_type(torch.randn(D, requires_grad=True), {"tp": I})
    torch.where(valid[:, None], (x * weight).exp(), 0).sum().backward()
    grad, other = leaf.grad, weight.grad
    assert grad is not None and other is not None
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        assert bool((grad[N:] == 0).all()) and bool((grad[:N] != 0).all())


def test_an_error_names_the_tensor_the_rows_and_the_fix() -> None:
    logits, _, _ = routed()
    with pytest.raises(PlacementError) as caught:
        logits.sum(0)
    error = caught.value
    assert error.name == "logits" and error.actual == "padded in dim 0 (first 5 valid)"
    assert "summed or counted" in error.rule
    assert list(map(str, error.fixes)) == [
        "torch.where(valid[:, None], logits, 0)", "logits[:5]",
    ]  # fmt: skip
    assert "logits f32[8, 6]{tp:R}, padded in dim 0 (first 5 valid)" in str(error)
