"""Memory that has a type is not written behind it: opaque code, raw collectives."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as DTensorPartial
from torch.distributed.tensor import Replicate as DTensorReplicate

from placements import (
    I,
    P,
    PlacementError,
    R,
    S,
    V,
    all_gather,
    all_reduce,
    all_to_all,
    assert_type,
    convert,
    reduce_scatter,
    region,
    set_current_mesh,
    type_of,
    typecheck,
    verify,
)
from placements.testing import device_mesh, run_ranks


@pytest.fixture
def checked() -> Iterator[None]:
    with set_current_mesh({"tp": 4}), typecheck():
        yield


def of(t: Any, *shape: int) -> Tensor:
    return assert_type(torch.ones(*shape or (4,)), {"tp": t})


def opaque(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return region(fn, ins=[{"tp": V}], grads=[{"tp": V}], outs={"tp": V})


class _Writes(torch.autograd.Function):
    @staticmethod
    def placement_rule(x: Any) -> Any:
        return x

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.add_(1)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class _MarksDirty(_Writes):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)


class _MarksDirtyAndChanges(_MarksDirty):
    @staticmethod
    def placement_rule(x: Any) -> Any:
        return {"tp": R}


class _ReadsOnly(_Writes):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + 1


def test_a_region_that_writes_its_argument_is_refused(checked: None) -> None:
    counts_E = of(V)
    with pytest.raises(PlacementError, match="it writes into counts_E") as caught:
        opaque(lambda x: x.add_(1))(counts_E)
    assert "pass counts_E.clone()" in str(caught.value)
    assert "other names for the same memory" in str(caught.value)
    assert type_of(opaque(lambda x: x.clone().add_(1))(counts_E)) == {"tp": V}


def test_a_view_of_an_argument_is_its_memory(checked: None) -> None:
    x = of(V)
    with pytest.raises(PlacementError, match="it writes into x"):
        opaque(lambda x: x[:2].mul_(2))(x)


def test_a_function_that_writes_its_argument_is_refused(checked: None) -> None:
    x = of(V)
    with pytest.raises(PlacementError, match=r"_Writes\.apply at .*: it writes into x"):
        _Writes.apply(x)
    assert type_of(_ReadsOnly.apply(x)) == {"tp": V}


def test_a_function_may_return_the_argument_it_writes_with_its_type(checked: None) -> None:
    x = of(V)
    assert _MarksDirty.apply(x) is x and type_of(x) == {"tp": V}
    with pytest.raises(PlacementError, match="it writes into x"):
        _MarksDirtyAndChanges.apply(x)


def reduced_in_place() -> tuple[str, str]:
    """B28: the reduction is done in the memory of the local counts."""

    def reduce(counts_E: Tensor) -> Tensor:
        dist.all_reduce(counts_E)
        return counts_E.clone()

    class Reduce(_Writes):
        @staticmethod
        def placement_rule(x: Any) -> Any:
            return {"tp": R}

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return reduce(x)

    found: list[str] = []
    with set_current_mesh(device_mesh()), typecheck():
        local_E = of(V)
        claim = region(reduce, ins=[{"tp": V}], grads=[{"tp": V}], outs={"tp": V})
        for call in (claim, Reduce.apply):
            try:
                call(local_E)
            except PlacementError as error:
                found.append(str(error))
    return found[0], found[1]


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_a_collective_that_reduces_in_place_is_seen_in_opaque_code(backend: Any) -> None:
    for texts in run_ranks({"tp": 2}, reduced_in_place, backend=backend):
        for text in texts:
            assert "it writes into local_E" in text and "local_E.clone()" in text


def written_by_a_kernel() -> str:
    """As Triton and C++ do, behind torch's count of writes."""

    def kernel(x: Tensor) -> Tensor:
        memory = numpy.frombuffer(
            (__import__("ctypes").c_float * x.numel()).from_address(x.data_ptr()),
            dtype=numpy.float32,
        )
        memory += 1
        return x.clone()

    with set_current_mesh(device_mesh()):
        try:
            with verify():
                x = of(V)
                opaque(kernel)(x)
        except PlacementError as error:
            return str(error)
    return ""


def test_verify_compares_the_values_of_arguments() -> None:
    assert "it writes into x" in run_ranks({"tp": 2}, written_by_a_kernel)[0]


def test_a_tensor_is_not_given_another_memory(checked: None) -> None:
    x, other = of(R), of(V)
    with pytest.raises(PlacementError, match="x is given other memory"):
        x.set_(other)  # type: ignore[arg-type]
    assert torch.empty(0).set_(torch.ones(2)).shape == (2,)  # type: ignore[arg-type]


def test_leaving_puts_tensors_back() -> None:
    with set_current_mesh({}), typecheck():
        assert "set_" in Tensor.__dict__
    assert "set_" not in Tensor.__dict__


def raw_calls() -> dict[str, str]:
    world, peer = dist.group.WORLD, 1 - dist.get_rank()
    mesh = device_mesh()
    pending = DTensor.from_local(torch.ones(4), mesh, [DTensorPartial()], run_check=False)
    said: dict[str, str] = {}
    with set_current_mesh(mesh), typecheck():
        x, out = of(V), torch.empty(8)
        calls: dict[str, Callable[[], Any]] = {
            "async": lambda: dist.all_reduce(x, async_op=True),
            "into tensor": lambda: dist.all_gather_single(out, x),
            "scatter tensor": lambda: dist.reduce_scatter_single(out[:2], x),
            "exchange": lambda: dist.all_to_all_single(out[:4], x),
            "scatter": lambda: dist.scatter(out[:4], None, peer),
            "gather": lambda: dist.gather(x, None, peer),
            "send": lambda: dist.send(x, peer),
            "isend": lambda: dist.isend(x, peer),
            "recv": lambda: dist.recv(x, peer),
            "batched": lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer)]),
            "op": lambda: torch.ops._c10d_functional.all_reduce(x, "sum", world.group_name),
            "functional broadcast": lambda: functional_collectives.broadcast(x, 0, world),
            "functional exchange": lambda: functional_collectives.all_to_all_single(
                x, None, None, world
            ),
            "functional autograd": lambda: functional_collectives.all_to_all_single_autograd(
                x, [2, 2], [2, 2], world
            ),
            "permute": lambda: functional_collectives.permute_tensor(x, [1, 0], world),
            "coalesced": lambda: functional_collectives.all_reduce_coalesced([x], "sum", world),
            "DTensor": lambda: pending.redistribute(mesh, [DTensorReplicate()]),
            "whole DTensor": pending.full_tensor,
            "objects": lambda: dist.all_gather_object([None, None], 1),
            "object list": lambda: dist.broadcast_object_list([1], 0),
        }  # fmt: skip
        for name, call in calls.items():
            try:
                call()
                said[name] = "passed"
            except PlacementError as error:
                said[name] = str(error)
        assert torch.equal(x, torch.ones(4)), "a refused collective has sent nothing"
    return said


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_every_way_to_a_raw_collective_is_refused(backend: Any) -> None:
    for said in run_ranks({"tp": 2}, raw_calls, backend=backend):
        for name, text in said.items():
            reason = (
                "takes no DTensors"
                if "DTensor" in name
                else "a raw torch.distributed collective"
            )
            assert reason in text, name
            assert "  fix       " in text, name


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")
def test_the_differentiable_collectives_of_torch_are_refused() -> None:
    def raw() -> str:
        with set_current_mesh(device_mesh()), typecheck():
            with pytest.raises(PlacementError) as caught:
                torch.distributed.nn.functional.all_reduce(of(V))
        return str(caught.value)

    text = run_ranks({"tp": 2}, raw)[0]
    assert "raw torch.distributed collective" in text
    assert "placements.all_reduce(x, axis, src=P, dst=R)" in text


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "all_reduce": lambda x: all_reduce(x, "tp", src=P, dst=R),
    "all_reduce to I": lambda x: all_reduce(x, "tp", src=P, dst=I),
    "all_gather": lambda x: all_gather(x, "tp", src=S(0), dst=R),
    "stack": lambda x: all_gather(x, "tp", src=V, dst=R),
    "reduce_scatter": lambda x: reduce_scatter(x, "tp", src=P, dst=S(0)),
    "unbind": lambda x: reduce_scatter(x[:2], "tp", src=P, dst=V),
    "all_to_all": lambda x: all_to_all(x, "tp", src=V, dst=V),
    "cut": lambda x: convert(x, "tp", src=R, dst=S(0)),
    "place": lambda x: convert(x, "tp", src=S(0), dst=P),
}


def pure(name: str) -> bool:
    move = MOVES[name]
    with set_current_mesh(device_mesh()):
        x = torch.arange(4.0)
        before, version = x.clone(), x._version
        y = move(x)
        apart = y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        return apart and torch.equal(x, before) and x._version == version


@pytest.mark.parametrize("name", MOVES)
def test_a_typed_collective_reads_its_input_and_returns_memory_of_its_own(
    name: str,
) -> None:
    assert all(run_ranks({"tp": 2}, pure, name))
