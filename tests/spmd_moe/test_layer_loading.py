"""State is saved, loaded and copied at any time: before the first call, inside a block."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from placements import (
    P,
    PlacementError,
    R,
    assert_type,
    set_current_mesh,
    split,
    type_of,
    typecheck,
)
from placements.testing import run_ranks
from spmd_moe import MoE, Parallel, update_expert_bias
from tests.spmd_moe.test_layouts import BY_NAME
from tests.support.moe import CONFIG, meshes

BALANCED = replace(CONFIG, load_balance_coeff=1e-3)
BIAS = "router.balance.expert_bias_E"

MESHES: list[tuple[Mapping[str, int], Parallel]] = [
    ({}, Parallel()),
    ({"dp": 1, "cp": 1, "tp": 1}, Parallel()),
    ({"tp": 2}, Parallel(tp=2)),
]


def called(moe: MoE) -> Tensor:
    x = assert_type(torch.ones(2, 5, 8), moe.input_types(5))
    return moe(x, seq_len=5)


def made(parallel: Parallel, **options: Any) -> MoE:
    return MoE(BALANCED, parallel, **options)


def late(parallel: Parallel) -> MoE:
    moe = made(parallel, device="meta").to_empty(device="cpu")
    moe.reset_parameters()
    return moe


def same(moe: MoE, state: Mapping[str, Tensor]) -> None:
    values = {name: value.tolist() for name, value in moe.state_dict().items()}
    assert values == {name: value.tolist() for name, value in state.items()}


@pytest.mark.parametrize("make", [made, late])
@pytest.mark.parametrize(("mesh", "parallel"), MESHES)
def test_a_layer_made_in_a_block_is_saved_and_copied_before_its_first_call(
    mesh: Mapping[str, int], parallel: Parallel, make: Callable[[Parallel], MoE]
) -> None:
    with set_current_mesh(mesh):
        expected = made(parallel).state_dict()
        with typecheck():
            moe = make(parallel)
            assert list(moe.state_dict()) == list(expected)
            assert [b.clone().shape for b in moe.buffers()] == [(4,)]
            assert moe.router.balance.counts_E.clone().shape == (4,)
            assert moe.bfloat16().float().double() is moe
            moe.reset_parameters()
            update_expert_bias(moe)
        same(moe.float(), expected)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("where", ["outside", "inside", "called"])
@pytest.mark.parametrize(("mesh", "parallel"), MESHES)
def test_a_layer_is_loaded_in_a_block(
    mesh: Mapping[str, int], parallel: Parallel, where: str, assign: bool
) -> None:
    with set_current_mesh(mesh):
        source = made(parallel, seed=3)
        source.router.balance.expert_bias_E.copy_(torch.tensor([1.0, 2, 3, 4]))
        state = {name: value.clone() for name, value in source.state_dict().items()}
        moe = made(parallel)
        with typecheck():
            if where != "outside":
                moe = made(parallel, device="meta" if assign else None)
            if where == "called" and not assign:
                called(moe)
            moe.load_state_dict(state, assign=assign)
            moe.state_dict()
            y, expected = called(moe), called(source)
            assert type_of(y) == type_of(expected)
            assert type_of(moe.router.balance.counts_E) is not None
        assert torch.equal(y, expected)
        same(moe, source.state_dict())
        counts = [m.router.balance.counts_E.tolist() for m in (moe, source)]
        assert counts[0] == counts[1]


def loaded_on_ranks(parallel: Parallel, where: str) -> bool:
    with meshes(parallel) as (dense, sparse):
        source = made(parallel, sparse_mesh=sparse, seed=3)
        whole = torch.arange(4 * 5 * 8, dtype=torch.float32).view(4, 5, 8)
        x = split(whole, source.input_types(5), dense)[dist.get_rank()]
        state = source.state_dict()
        moe = made(parallel, sparse_mesh=sparse)
        with typecheck():
            assert_type(x, source.input_types(5))
            if where in ("fresh", "meta"):
                device = "meta" if where == "meta" else None
                moe = made(parallel, sparse_mesh=sparse, device=device)
            if where == "called":
                moe(x, seq_len=5)
            moe.load_state_dict(state, assign=where == "meta")
            y, z = moe(x, seq_len=5), source(x, seq_len=5)
            update_expert_bias(moe)
            update_expert_bias(source)
        return torch.equal(y, z) and torch.equal(*(
            m.router.balance.expert_bias_E for m in (moe, source)
        ))  # fmt: skip


@pytest.mark.parametrize("where", ["outside", "called", "fresh", "meta"])
@pytest.mark.parametrize("name", ["C1", "C4", "C5"])
def test_a_layer_is_loaded_in_a_block_on_ranks(name: str, where: str) -> None:
    parallel = BY_NAME[name]
    assert all(run_ranks(parallel.dense_mesh(), loaded_on_ranks, parallel, where))


def test_a_value_of_another_type_is_not_loaded() -> None:
    with set_current_mesh({"tp": 2}), typecheck():
        moe = made(Parallel(tp=2))
        state = moe.state_dict()
        state[BIAS] = assert_type(torch.tensor([1.0, 2, 3, 4]), {"tp": P})
        with pytest.raises(PlacementError) as caught:
            moe.load_state_dict(state)
        assert caught.value.axis == "tp"
        state[BIAS] = assert_type(torch.tensor([1.0, 2, 3, 4]), {"tp": R})
        moe.load_state_dict(state)
    assert moe.router.balance.expert_bias_E.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("assign", [False, True])
def test_factories_of_a_block_are_loaded(assign: bool) -> None:
    with set_current_mesh({"tp": 2}), typecheck():
        moe = made(Parallel(tp=2))
        state = {name: torch.zeros(v.shape) for name, v in moe.state_dict().items()}
        moe.load_state_dict(state, assign=assign)
        moe.state_dict()
        moe.reset_parameters()
        moe.state_dict()
        called(moe)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_layer_loaded_for_inference_is_trained(device: str) -> None:
    moe, state = MoE(BALANCED, device=device), MoE(BALANCED).state_dict()
    held = moe.router.balance.counts_E
    with torch.inference_mode():
        moe.load_state_dict(state, assign=device == "meta")
    moe(torch.randn(6, 8), seq_len=6).sum().backward()
    assert moe.router.balance.counts_E.sum() == 12
    assert (moe.router.balance.counts_E is held) == (device == "cpu")


@pytest.mark.parametrize("checked", [False, True])
def test_counts_start_again_after_a_checkpoint_without_a_bias(checked: bool) -> None:
    state = {k: v for k, v in MoE(BALANCED).state_dict().items() if k != BIAS}
    with set_current_mesh({}), typecheck() if checked else nullcontext():
        moe = MoE(BALANCED, device="meta").to_empty(device="cpu")
        moe.router.balance.counts_E.fill_(77)
        moe.load_state_dict(state, strict=False)
        assert moe.router.balance.counts_E.tolist() == [0] * 4


def test_counts_follow_a_bias_that_was_moved_by_hand() -> None:
    """As FSDP2 moves buffers, without a word to the module."""
    moe = MoE(BALANCED, device="meta")
    moe.load_state_dict(MoE(BALANCED).state_dict(), assign=True)
    moe.router.balance.counts_E = torch.zeros(4, dtype=torch.int64, device="meta")
    moe(torch.randn(6, 8), seq_len=6)
    assert moe.router.balance.counts_E.sum() == 12


@pytest.mark.parametrize("value", [None, numpy.zeros(4, dtype="float32")], ids=type)
def test_a_bias_that_is_no_tensor_is_refused_by_torch(value: Any) -> None:
    moe = MoE(BALANCED)
    with pytest.raises(RuntimeError, match=r"expert_bias_E.*expected torch\.Tensor"):
        moe.load_state_dict({**moe.state_dict(), BIAS: value})
