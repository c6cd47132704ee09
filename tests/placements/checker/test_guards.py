"""Nothing gets past the checker in silence: unknown ops, untyped tensors, raw collectives."""

import gc
import weakref

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives

from placements import (
    P,
    PlacementError,
    R,
    S,
    UncheckedWarning,
    assert_type,
    register_op,
    set_current_mesh,
    type_of,
    typecheck,
)
from placements.checker.lookup import torch_name
from placements.inference.ops import OPS
from placements.testing import run_ranks
from placements.testing.ranks.run import device_mesh


def test_an_unknown_op_is_refused_by_name_with_the_line_that_adds_it() -> None:
    with set_current_mesh({"tp": 2}), typecheck():
        x = assert_type(torch.rand(3), {"tp": S(0)})
        with pytest.raises(PlacementError, match="special_hermite_polynomial_h") as caught:
            torch.special.hermite_polynomial_h(x, 2)
        assert "register_op('special_hermite_polynomial_h'" in str(caught.value)
        register_op("special_hermite_polynomial_h", like="exp")
        try:
            assert type_of(torch.special.hermite_polynomial_h(x, 2)) == {"tp": S(0)}
        finally:
            del OPS["special_hermite_polynomial_h"]


def test_a_custom_op_is_not_mistaken_for_a_known_one() -> None:
    @torch.library.custom_op("placements_tests::relu", mutates_args=())
    def relu(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert torch_name(torch.ops.placements_tests.relu) == "placements_tests::relu"
    with set_current_mesh({"tp": 2}), typecheck():
        x = assert_type(torch.rand(3), {"tp": S(0)})
        with pytest.raises(PlacementError, match="placements_tests::relu"):
            torch.ops.placements_tests.relu(x)


def test_registering_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="not in the table"):
        register_op("special_hermite_polynomial_h", like="nonsense")
    with pytest.raises(ValueError, match="in the table of ops already"):
        register_op("add", like="sub")


def test_an_untyped_tensor_is_refused_by_name() -> None:
    weights = torch.ones(3)
    with set_current_mesh({"tp": 2}), typecheck():
        x = assert_type(torch.rand(3), {"tp": S(0)})
        with pytest.raises(PlacementError, match="weights has no placement") as caught:
            x * weights
        assert "assert_type(weights, {'tp': ...})" in str(caught.value)


def test_on_one_device_nothing_needs_to_be_declared() -> None:
    with set_current_mesh({}), typecheck():
        assert type_of(torch.ones(3) + torch.tensor([1.0, 2.0, 3.0])) == {}


def raw_collectives() -> list[str]:
    calls = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(2)),
        "broadcast": lambda: dist.broadcast(torch.ones(2), 0),
        "all_gather": lambda: dist.all_gather([torch.ones(2)] * 2, torch.ones(2)),
        "reduce": lambda: dist.reduce(torch.ones(2), 0),
        "functional": lambda: functional_collectives.all_reduce(
            torch.ones(2), "sum", dist.group.WORLD
        ),
        "group method": lambda: dist.group.WORLD.allreduce([torch.ones(2)]),
    }
    refused: list[str] = []
    with set_current_mesh(device_mesh()), typecheck():
        for name, call in calls.items():
            try:
                call()
            except PlacementError as error:
                assert "raw torch.distributed collective" in str(error)
                assert "placements." in str(error)
                refused.append(name)
    dist.all_reduce(torch.ones(2))
    assert refused == list(calls)
    return refused


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_a_raw_collective_is_refused_with_the_typed_call(backend: str) -> None:
    for refused in run_ranks({"tp": 2}, raw_collectives, backend=backend):
        assert len(refused) == 6


def test_leaving_typecheck_puts_torch_back_as_it_was() -> None:
    apply = torch.autograd.Function.__dict__["apply"]
    allreduce = dist.ProcessGroup.__dict__["allreduce"]
    with set_current_mesh({}), typecheck():
        with typecheck():
            pass
        assert torch.autograd.Function.__dict__["apply"] is not apply
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert dist.ProcessGroup.__dict__["allreduce"] is allreduce


def test_types_keep_nothing_alive() -> None:
    with set_current_mesh({"tp": 2}), typecheck():
        x = assert_type(torch.rand(3), {"tp": S(0)})
        y = x * 2
        freed = [weakref.ref(x), weakref.ref(y)]
        del x, y
        gc.collect()
        assert [ref() for ref in freed] == [None, None]


def test_what_was_inferred_on_one_device_is_not_believed_on_a_mesh() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.warns(UncheckedWarning), typecheck():
        double(torch.from_numpy(numpy.ones(1)))
    with set_current_mesh({}), typecheck():
        double(torch.from_numpy(numpy.ones(1)))
    with set_current_mesh({"tp": 2}), typecheck():
        with pytest.raises(PlacementError, match="no placement"):
            double(torch.from_numpy(numpy.ones(1)))


def test_equal_values_of_partial_tensors_are_not_compared() -> None:
    with set_current_mesh({"tp": 2}), typecheck():
        p = assert_type(torch.ones(2), {"tp": P})
        r = assert_type(torch.ones(2), {"tp": R})
        with pytest.raises(PlacementError, match="one summand"):
            torch.equal(p, r)
