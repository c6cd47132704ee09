"""A user's annotated module, in our words, under the checker of `spmd_types`."""

from collections.abc import Callable
from typing import Annotated, Any

import pytest
import spmd_types
import torch
from torch import Tensor, nn

import placements as pl
from placements import I, On, P, R, S, V
from placements.interop.fake_world import device_mesh_of, fake_world, quiet
from placements.interop.second_engine import typecheck
from placements.interop.spmd_types import SpmdTypes
from placements.testing import device_mesh, run_ranks
from placements.testing.compare.one_device import check_value

WEIGHTS = {"w1": {"tp": S(1)}, "w2": {"tp": S(0)}}


@pl.typed
class Mlp(nn.Module):
    """Column and row parallel, as a user writes it."""

    w1: Annotated[Tensor, On(tp=S(1))]
    w2: Annotated[Tensor, On(tp=S(0))]

    def __init__(self, w1: Tensor, w2: Tensor) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(w1), nn.Parameter(w2)

    def forward(self, x: Annotated[Tensor, On(tp=I)]) -> Annotated[Tensor, On(tp=I)]:
        x = pl.convert(x, "tp", src=I, dst=R)
        return pl.all_reduce(self.product(x), "tp", src=P, dst=I)

    @pl.typed
    def product(self, x: Annotated[Tensor, On(tp=R)]) -> Annotated[Tensor, On(tp=P)]:
        return (x @ self.w1).square() @ self.w2


class Biased(Mlp):
    """Adds a whole bias to summands."""

    def product(self, x: Tensor) -> Tensor:
        return super().product(x) + x.sum()


def whole() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (4, 6), (6, 4))
    x, w1, w2 = (torch.randint(-2, 3, s, generator=generator).double() for s in shapes)
    return x, w1, w2


def trained(kind: type[Mlp], checking: Callable[[], Any]) -> list[Tensor]:
    with pl.set_current_mesh(device_mesh()):
        x, w1, w2 = whole()
        place = torch.distributed.get_rank()
        mlp = kind(w1.chunk(2, 1)[place].clone(), w2.chunk(2, 0)[place].clone())
        x.requires_grad_()
        with checking():
            y = mlp(pl.assert_type(x, {"tp": I}))
            y.sum().backward()
    assert x.grad is not None and mlp.w1.grad is not None
    return [y.detach(), x.grad, mlp.w1.grad]


@pytest.mark.parametrize("local", [True, False], ids=["local", "global"])
def test_the_module_computes_the_same_under_both_engines(local: bool) -> None:
    with quiet(), SpmdTypes(local=True).on_threads():
        theirs = run_ranks({"tp": 2}, trained, Mlp, lambda: typecheck(local=local))
        with pytest.raises(Exception, match="Partial"):
            run_ranks({"tp": 2}, trained, Biased, lambda: typecheck(local=local))
    ours = run_ranks({"tp": 2}, trained, Mlp, pl.typecheck)
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            check_value("equal", a, b)


SAID: dict[str, tuple[Callable[[Tensor], Tensor], Any, dict[str, Any]]] = {
    "exchange": (lambda x: pl.all_to_all(x, "tp", src=V, dst=V), V, {"tp": V}),
    "started": (lambda x: pl.all_to_all_start(x, "tp", V, V).wait(), V, {"tp": V}),
    "recut": (lambda x: pl.all_to_all(x, "tp", src=S(0), dst=S(1)), S(0), {"tp": V}),
    "gather": (lambda x: pl.all_gather(x, "tp", src=S(0), dst=R), S(0), {"tp": R}),
    "scatter": (lambda x: pl.reduce_scatter(x, "tp", src=P, dst=S(0)), P, {"tp": V}),
    "redistribute": (lambda x: pl.redistribute(x, "tp", P, I), P, {"tp": I}),
    "cut": (lambda x: pl.convert(x, "tp", src=R, dst=S(1)), R, {"tp": V}),
    "sum": (lambda x: pl.reinterpret(x, "tp", src=V, dst=P), V, {"tp": P}),
    "numbers": (lambda x: pl.row_numbers(x, 0), S(0), {"tp": V}),
    "mesh": (lambda x: pl.reinterpret_mesh(x, device_mesh()), R, {"tp": R}),
}


@pytest.mark.parametrize("call", SAID)
def test_a_typed_call_is_the_peers(call: str) -> None:
    fn, given, wanted = SAID[call]

    def on_rank(checking: Any) -> Tensor:
        x = torch.arange(16.0).double().view(4, 4) + 100 * torch.distributed.get_rank()
        x = torch.arange(16.0).double().view(4, 4) if given == R else x
        with pl.set_current_mesh(device_mesh()), checking():
            y = fn(pl.assert_type(x, {"tp": given}))
            known = pl.type_of(y)
            assert known is not None
            if checking is typecheck:
                assert dict(known) == wanted
        return y

    with quiet(), SpmdTypes(local=True).on_threads():
        theirs = run_ranks({"tp": 2}, on_rank, typecheck)
    for ours, other in zip(
        run_ranks({"tp": 2}, on_rank, pl.typecheck), theirs, strict=True
    ):
        assert torch.equal(ours, other)


def test_rows_that_are_cut_in_runs() -> None:
    def on_rank(checking: Any) -> Tensor:
        rows = pl.Folded(2, pl.Padded(4)).over(2)
        x = torch.arange(16.0).double().view(2, 2, 4) + 100 * torch.distributed.get_rank()
        with pl.set_current_mesh(device_mesh()), checking():
            x = pl.assert_type(x, {"tp": S(1)}).flatten(0, 1)
            return pl.all_gather(x, "tp", src=S(0, rows), dst=R)

    with quiet(), SpmdTypes(local=True).on_threads():
        theirs = run_ranks({"tp": 2}, on_rank, typecheck)
    assert torch.equal(theirs[0], run_ranks({"tp": 2}, on_rank, pl.typecheck)[0])


def test_what_cannot_be_said_there() -> None:
    mesh, x = pl.Mesh({"tp": 2}), torch.ones(2, 2)
    with fake_world(), pl.set_current_mesh(device_mesh_of(mesh)), typecheck(local=False):
        pl.assert_type(x, {"tp": S(0)})
        with pytest.raises(ValueError, match="equal pieces only"):
            pl.all_gather(x, "tp", src=S(0, pl.Padded(3)), dst=R)
        with pytest.raises(ValueError, match="region"):
            pl.reinterpret(x, "tp", src=S(0), dst=V)
        with pytest.raises(spmd_types.SpmdTypeError):
            pl.assert_type(x, {"tp": I})
        with pytest.raises(ValueError, match="dst=R or dst=I"):
            pl.all_reduce(x, "tp")


def test_one_engine_checks() -> None:
    with fake_world(), pl.set_current_mesh({"tp": 2}), pl.typecheck():
        with pytest.raises(ValueError, match="one engine"), typecheck():
            pass


def test_a_region_is_local() -> None:
    mesh, x = pl.Mesh({"tp": 2}), torch.ones(2, 2)
    sorted_rows = pl.region(
        lambda x: x.sort(0).values, ins=[{"tp": S(0)}], outs={"tp": S(0)},
        grads=[{"tp": S(0)}],
    )  # fmt: skip
    with fake_world(), pl.set_current_mesh(device_mesh_of(mesh)), typecheck(local=False):
        pl.assert_type(x, {"tp": S(0)})
        assert dict(pl.type_of(sorted_rows(x)) or {}) == {"tp": S(0)}
