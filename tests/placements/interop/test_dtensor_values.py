"""DTensors of unequal pieces, with the types of their gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
from torch import Tensor

import placements as pl
from placements import Folded, I, P, Padded, R, S, V
from placements.interop.dtensor_values import types_in, unwrap, wrap
from placements.testing import device_mesh, run_ranks

ROWS = {"tp": S(0, Padded(5))}
WHOLE = torch.arange(10.0).double().view(5, 2)


def mine() -> Tensor:
    return WHOLE.chunk(2)[dist.get_rank()].clone()


def test_unequal_pieces_are_exact_where_from_local_guesses() -> None:
    def body() -> tuple[Any, ...]:
        mesh, x = device_mesh(), mine().requires_grad_()
        guessed = dt.DTensor.from_local(mine(), mesh, [dt.Shard(0)], run_check=False)
        wrapped = wrap(x, ROWS, mesh, grads={"tp": S(0)})
        wrapped.full_tensor().square().sum().backward()
        back = unwrap(wrapped, {"tp": S(0)}, mesh, grads={"tp": S(0)})
        same = torch.equal(back, x)
        return guessed.shape[0], wrapped.full_tensor().detach(), x.grad, same

    ranks = run_ranks({"tp": 2}, body)
    assert {size for size, *_ in ranks} == {6, 4}  # neither is 5
    for rank, (_, found, grad, same) in enumerate(ranks):
        assert torch.equal(found, WHOLE) and same
        assert grad.shape == WHOLE.chunk(2)[rank].shape


def test_the_gradient_of_a_replicate_is_what_is_said() -> None:
    def body(t: Any, grads: Any) -> Tensor:
        mesh, x = device_mesh(), WHOLE.clone().requires_grad_()
        value = wrap(x, {"tp": I}, mesh, grads={"tp": I})
        local = unwrap(value, {"tp": t}, mesh, grads={"tp": grads})
        (local * (1 + dist.get_rank())).sum().backward()
        assert x.grad is not None
        return x.grad

    for grad in run_ranks({"tp": 2}, body, R, P):
        assert torch.equal(grad, torch.full_like(WHOLE, 3.0))  # summed over the ranks
    for rank, grad in enumerate(run_ranks({"tp": 2}, body, I, I)):
        assert torch.equal(grad, torch.full_like(WHOLE, 1.0 + rank))  # as it is


def test_in_a_block_what_is_unwrapped_has_its_type() -> None:
    def body() -> None:
        mesh = device_mesh()
        value = wrap(mine(), ROWS, mesh, grads=ROWS)
        with pl.set_current_mesh(mesh), pl.typecheck():
            x = unwrap(value, {"tp": S(0)}, mesh, grads={"tp": S(0)})
            assert repr(pl.type_of(x)) == "{tp:S(0, Padded(5))}"

    run_ranks({"tp": 2}, body)


def test_a_strided_shard_is_a_folded_extent() -> None:
    def body() -> None:
        mesh = device_mesh()
        value = dt.distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [dt.Shard(1)])
        flat = value.flatten()
        assert type(flat.placements[0]).__name__ == "_StridedShard"
        found = types_in(flat, mesh)
        assert repr(found["tp"]) == repr(S(0, Folded(4, Padded(4)).over(2)))
        assert torch.equal(
            flat.to_local(), pl.split(torch.arange(16.0), found, mesh)[dist.get_rank()]
        )

    run_ranks({"tp": 2}, body)


def test_what_is_refused() -> None:
    def body() -> None:
        mesh = device_mesh()
        with pytest.raises(ValueError, match="belongs to an Invariant value"):
            wrap(WHOLE, {"tp": R}, mesh, grads={"tp": I})
        with pytest.raises(ValueError, match="grads says None"):
            wrap(WHOLE, {"tp": I}, mesh, grads={})
        rows = WHOLE[: 2 + dist.get_rank()]
        with pytest.raises(ValueError, match=r"like torch\.chunk"):
            wrap(rows, {"tp": S(0, pl.Ragged(2, 3))}, mesh, grads=ROWS)
        with pytest.raises(ValueError, match="is no DTensor placement"):
            wrap(WHOLE, {"tp": V}, mesh, grads={"tp": V})
        value = wrap(mine(), ROWS, mesh, grads=ROWS)
        with pytest.raises(ValueError, match="expected"):
            unwrap(value, {"tp": I}, mesh, grads={"tp": I})

    run_ranks({"tp": 2}, body)
