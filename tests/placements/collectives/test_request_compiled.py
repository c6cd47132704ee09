"""Typed collectives in compiled code: one graph, and the numbers of eager code."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import placements
from placements import (
    I,
    P,
    Padded,
    R,
    S,
    V,
    all_reduce,
    all_to_all,
    ledger,
    set_current_mesh,
    set_gradient_dtype,
)
from placements.inference.transitions import TRANSITIONS, Transition
from placements.testing import device_mesh, run_ranks
from tests.support.compiled import same, traced, whole

TYPES: dict[str, Any] = {"R": R, "I": I, "V": V, "P": P, "S": S(0, Padded(5))}
# Rows that each rank sends to each rank.
SENT = [[1, 2], [0, 3]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        ids = [f"{row.call}_{row.src}_{row.dst}" for row in TRANSITIONS]
        metafunc.parametrize("row", TRANSITIONS, ids=ids)


def call_of(row: Transition) -> Callable[[Tensor], Tensor]:
    """The call of a row, on this rank."""
    call = getattr(placements, row.call)
    src, dst = TYPES[row.src], TYPES[row.dst]
    if row.action == "exchange":
        rank = dist.get_rank()
        sends, receives = SENT[rank], [sent[rank] for sent in SENT]
        return lambda x: call(
            x, "tp", src, dst, input_split_sizes=sends, output_split_sizes=receives
        )
    if row.action == "recut":
        dst = S(1, Padded(3))
    return lambda x: call(x, "tp", src=src, dst=dst)


def operand(row: Transition) -> Tensor:
    """Whole numbers, which differ by rank where the type lets them."""
    rank = dist.get_rank()
    piece = row.src == "S" or (row.dst == "S" and row.call == "reinterpret")
    rows = 2 if row.dims_added == -1 else 3 - rank if piece else 3 if row.src == "V" else 5
    x = torch.arange(rows * 3, dtype=torch.float64).view(rows, 3) + 1
    return x if row.src in "RI" else x * (rank + 2)


def value_and_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    (y * torch.arange(1, y.numel() + 1).view_as(y)).sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def test_every_row_compiles_with_its_backward(row: Transition) -> None:
    def program() -> tuple[bool, int]:
        with set_current_mesh(device_mesh({"tp": 2})):
            call, x = call_of(row), operand(row)
            compiled = whole(lambda x: call(x * 2) + 1)
            wanted = value_and_gradient(lambda x: call(x * 2) + 1, x)
            equal = same(value_and_gradient(compiled, x), wanted)
            dist.barrier()
            with traced() as graphs:
                equal = equal and same(value_and_gradient(compiled, x), wanted)
        return equal, graphs[0]

    assert run_ranks({"tp": 2}, program) == [(True, 0), (True, 0)]


def test_the_dtypes_of_a_call_hold_in_compiled_code() -> None:
    def function(x: Tensor) -> Tensor:
        options: Any = {"op_dtype": torch.float64}
        return all_reduce(
            x, "tp", src=P, dst=R, out_dtype=torch.float64, backward_options=options
        )

    def program() -> list[bool]:
        x = torch.full((3,), 1 / 3) * (dist.get_rank() + 1)
        found: list[bool] = []
        with set_current_mesh(device_mesh({"tp": 2})):
            compiled = whole(function)
            for policy in (None, torch.bfloat16, torch.float64, None):
                with set_gradient_dtype(policy):
                    wanted = value_and_gradient(function, x)
                    found.append(same(value_and_gradient(compiled, x), wanted))
        return found

    assert run_ranks({"tp": 2}, program) == [[True] * 4] * 2


def test_a_policy_for_gradients_is_that_of_the_call_and_not_of_the_trace() -> None:
    def function(x: Tensor) -> Tensor:
        return all_reduce(x, "tp", src=P, dst=R)

    def program() -> list[tuple[bool, float]]:
        found: list[tuple[bool, float]] = []
        with set_current_mesh(device_mesh({"tp": 2})):
            compiled = whole(function)
            for policy in (None, torch.bfloat16, None):
                with set_gradient_dtype(policy):
                    got = []
                    for f in (function, compiled):
                        x = torch.ones(1).requires_grad_()
                        f(x).backward(torch.tensor([1.001]))
                        got.append(x.grad)
                found.append((torch.equal(*got), got[1].item()))
        return found

    rank, _ = run_ranks({"tp": 2}, program)
    assert [equal for equal, _ in rank] == [True] * 3
    assert rank[0] == rank[2] and rank[1][1] == 2.0 != rank[0][1]


def test_sizes_that_are_read_from_a_tensor_compile() -> None:
    def function(x: Tensor, sent: Tensor) -> Tensor:
        received = all_to_all(sent, "ep", src=V, dst=V)
        return all_to_all(
            x * 2, "ep", src=V, dst=V,
            input_split_sizes=sent.tolist(), output_split_sizes=received.tolist(),
        )  # fmt: skip

    def program() -> tuple[bool, int]:
        rank, equal = dist.get_rank(), True
        with set_current_mesh(device_mesh({"ep": 2})):
            compiled = whole(function)
            x = torch.arange(12.0).view(3, 4) * (rank + 1)
            for k, sent in enumerate(([1, 2], [3, 0], [0, 3])):
                if k == 1:
                    dist.barrier()
                    before = traced()
                    graphs = before.__enter__()
                counts = torch.tensor(sent if rank == 0 else [2, 1])
                pair = [
                    value_and_gradient(lambda x, f=f, c=counts: f(x, c), x)
                    for f in (function, compiled)
                ]
                equal = equal and same(*pair)
            before.__exit__(None, None, None)
        return equal, graphs[0]

    assert run_ranks({"ep": 2}, program) == [(True, 0), (True, 0)]


def test_sizes_that_do_not_fit_are_an_error_of_the_compiled_code_too() -> None:
    def function(x: Tensor, sent: Tensor) -> Tensor:
        sizes = sent.tolist()
        return all_to_all(
            x, "ep", src=V, dst=V, input_split_sizes=sizes, output_split_sizes=sizes
        )

    def program() -> str:
        with set_current_mesh(device_mesh({"ep": 2})):
            with pytest.raises(RuntimeError) as caught:
                whole(function)(torch.ones(3, 4), torch.tensor([1, 1]))
        return str(caught.value)

    for text in run_ranks({"ep": 2}, program):
        assert "Eq(" in text or "== 3" in text


def test_one_graph_is_refused_while_a_ledger_is_open() -> None:
    def function(x: Tensor) -> Tensor:
        return all_reduce(x, "tp", src=P, dst=I)

    def program() -> tuple[str, int]:
        with set_current_mesh(device_mesh({"tp": 2})):
            compiled = whole(function)
            compiled(torch.ones(2))  # compiled before
            with ledger() as record, pytest.raises(RuntimeError) as caught:
                compiled(torch.ones(2))
        return str(caught.value), len(record.entries)

    for text, entries in run_ranks({"tp": 2}, program):
        assert "tells no ledger()" in text and entries == 0


def test_what_may_break_is_recorded_as_it_is_written() -> None:
    def function(x: Tensor) -> Tensor:
        return all_reduce(x, "tp", src=P, dst=I)

    def program() -> int:
        # torch.compile warns of what it cannot trace, and runs it as it is written.
        with warnings.catch_warnings(), set_current_mesh(device_mesh({"tp": 2})):
            warnings.simplefilter("ignore")
            compiled = torch.compile(function, backend="aot_eager")
            compiled(torch.ones(2))
            with ledger() as record:
                compiled(torch.ones(2))
        return len(record.entries)

    assert run_ranks({"tp": 2}, program) == [1, 1]
