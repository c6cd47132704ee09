"""A collective that is started and waited for later: equal to the one that waits at once.

That its backward is the adjoint is one of the laws (`testing/laws/transitions_kept.py`).
"""

import gc
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from placements import (
    NotWaitedWarning,
    On,
    P,
    Padded,
    Pending,
    PlacementError,
    R,
    S,
    V,
    all_reduce,
    all_to_all,
    all_to_all_start,
    assert_type,
    ledger,
    reinterpret,
    set_current_mesh,
    type_of,
    typecheck,
    typed,
    verify,
)
from placements.testing import RankFailure, device_mesh, run_ranks
from tests.support.compiled import same, whole

# Rows that each rank sends to each rank.
SENT = [[1, 2], [0, 3]]


def exchange(x: Tensor, *, apart: bool, between: Callable[[], Tensor]) -> Tensor:
    """Rows change ranks, and meanwhile something else is computed."""
    rank = dist.get_rank()
    sizes = {
        "input_split_sizes": SENT[rank],
        "output_split_sizes": [sent[rank] for sent in SENT],
    }
    if apart:
        pending = all_to_all_start(x, "tp", V, V, **sizes)
        other = between()
        return pending.wait() + other
    rows = all_to_all(x, "tp", V, V, **sizes)
    return rows + between()


def recut(x: Tensor, *, apart: bool, between: Callable[[], Tensor]) -> Tensor:
    """Pieces along dim 0, 2 and 1, become pieces along dim 1."""
    src, dst = S(0, Padded(3)), S(1, Padded(3))
    if apart:
        pending = all_to_all_start(x, "tp", src, dst)
        other = between()
        return pending.wait() + other
    return all_to_all(x, "tp", src, dst) + between()


def operands(call: Any) -> tuple[Tensor, Tensor]:
    """Whole numbers, in memory with gaps."""
    rank = dist.get_rank()
    rows = 3 if call is exchange else 2 - rank
    x = torch.arange(rows * 3.0, dtype=torch.float64).view(3, rows).T * (rank + 2)
    w = torch.full((1,), 3.0, dtype=torch.float64)
    return x.requires_grad_(), w.requires_grad_()


def derived(call: Any, *, apart: bool, twice: bool = False) -> list[Tensor]:
    """Value and gradients; `twice` also those of the gradient."""
    x, w = operands(call)
    y = call(x * 2, apart=apart, between=lambda: (w * w).sum())
    found = [y.detach(), *torch.autograd.grad((y * y).sum(), (x, w), create_graph=twice)]
    if twice:
        found += torch.autograd.grad((found[1] ** 3).sum(), (x, w))
    return found


@pytest.mark.parametrize("backend", ["sim", "gloo"])
@pytest.mark.parametrize("call", [exchange, recut])
def test_value_and_gradients_are_those_of_the_plain_call(call: Any, backend: str) -> None:
    assert run_ranks({"tp": 2}, _equal, call, backend=backend) == [[True] * 3] * 2


@pytest.mark.parametrize("call", [exchange, recut])
def test_anomaly_mode_changes_nothing(call: Any) -> None:
    """On processes, as the mode belongs to a process, which simulated ranks share."""
    assert run_ranks({"tp": 2}, _equal_with_anomalies, call, backend="gloo") == [True] * 2


def _equal_with_anomalies(call: Any) -> bool:
    mesh = set_current_mesh(device_mesh({"tp": 2}))
    with mesh, torch.autograd.set_detect_anomaly(True):
        return same(*[derived(call, apart=apart) for apart in (True, False)])


def _equal(call: Any) -> list[bool]:
    found: list[bool] = []
    with set_current_mesh(device_mesh({"tp": 2})):
        for twice in (False, True):
            pair = [derived(call, apart=apart, twice=twice) for apart in (True, False)]
            found.append(same(*pair))
        with torch.no_grad():
            x, w = operands(call)
            pair = [call(x.detach(), apart=a, between=lambda: w) for a in (True, False)]
            found.append(same([pair[0]], [pair[1]]))
    return found


def test_on_one_rank_the_result_has_memory_of_its_own() -> None:
    x = torch.ones(3, 2, requires_grad=True)
    pending = all_to_all_start(x, "tp", V, V)
    result = pending.wait()
    result.sum().backward()
    assert torch.equal(result, x) and result.data_ptr() != x.data_ptr()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(3, 2))
    result.mul_(2)  # as the result of all_to_all may be written
    assert x.sum() == 6


def test_the_result_may_be_written_to() -> None:
    def program() -> float:
        with set_current_mesh(device_mesh({"tp": 2})):
            x = torch.ones(2, 2, requires_grad=True)
            y = all_to_all_start(x * 1, "tp", V, V).wait()
            y.mul_(3)
            y.sum().backward()
            assert x.grad is not None
        return x.grad.sum().item()

    assert run_ranks({"tp": 2}, program) == [12.0, 12.0]


def test_its_types_are_those_of_the_plain_call() -> None:
    """On a mesh of sizes alone, and on ranks, under typecheck() and verify()."""

    def program(block: Any) -> tuple[Any, Any, list[bool]]:
        rows = 2 - dist.get_rank()
        x = torch.arange(3.0 * rows).view(rows, 3)
        with set_current_mesh(device_mesh({"tp": 2})), block():
            x = assert_type(x, {"tp": S(0, Padded(3))}).requires_grad_()
            found, types = [], []
            for apart in (True, False):
                y = recut(x, apart=apart, between=lambda: torch.zeros(()))
                types.append(type_of(y))
                loss = all_reduce((y * y).sum(), "tp", src=P, dst=R)
                loss = reinterpret(loss, "tp", src=R, dst=P)
                found.append([y.detach(), *torch.autograd.grad(loss, x)])
            equal = [torch.equal(a, b) for a, b in zip(*found, strict=True)]
        return *types, equal

    for block in (typecheck, verify):
        for plain, apart, equal in run_ranks({"tp": 2}, program, block):
            assert plain == apart == {"tp": S(1, Padded(3))} and equal == [True, True]
    with set_current_mesh({"tp": 2}), typecheck():
        x = assert_type(torch.ones(4, 2), {"tp": V})
        pending = all_to_all_start(x, "tp", V, V)
        assert type_of(pending.wait()) == {"tp": V}


def test_a_call_that_is_wrong_sends_nothing() -> None:
    def program() -> tuple[str, int]:
        with set_current_mesh(device_mesh({"tp": 2})), typecheck(), ledger() as record:
            x = assert_type(torch.ones(4, 2), {"tp": R})
            with pytest.raises(PlacementError) as caught:
                all_to_all_start(x, "tp", V, V)
        return str(caught.value), len(record.entries)

    for text, entries in run_ranks({"tp": 2}, program):
        assert "x is Replicate on axis 'tp', expected Varying" in text and entries == 0


def test_the_ledger_has_it_once_where_it_starts() -> None:
    def program() -> list[tuple[str, int, bool, bool]]:
        with set_current_mesh(device_mesh({"tp": 2})), ledger() as record:
            x = torch.ones(4, 2, requires_grad=True)
            pending = all_to_all_start(x, "tp", V, V)
            started = len(record.entries) == 1
            pending.wait().sum().backward()
        here = [entry.caller.startswith("test_pending") for entry in record.entries]
        return [
            (e.kind, e.nbytes, e.backward, started and h)
            for e, h in zip(record.entries, here, strict=True)
        ]

    expected = [("all-to-all", 32, False, True), ("all-to-all", 32, True, True)]
    assert run_ranks({"tp": 2}, program) == [expected] * 2


@pytest.mark.parametrize("call", [exchange, recut])
def test_it_compiles_as_one_graph(call: Any) -> None:
    def program() -> bool:
        with set_current_mesh(device_mesh({"tp": 2})):
            x, w = operands(call)

            def function(x: Tensor, w: Tensor) -> Tensor:
                return call(x * 2, apart=True, between=lambda: (w * w).sum())

            y = whole(function)(x, w)
            found = [y.detach(), *torch.autograd.grad((y * y).sum(), (x, w))]
            return same(found, derived(call, apart=False))

    assert run_ranks({"tp": 2}, program) == [True, True]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_computes_it_again(reentrant: bool) -> None:
    """One without reentry stops between start and wait: nothing more was saved."""

    def program() -> tuple[bool, int]:
        with set_current_mesh(device_mesh({"tp": 2})), ledger() as record:
            x, w = operands(exchange)

            def function(x: Tensor, w: Tensor) -> Tensor:
                return exchange(x * 2, apart=True, between=lambda: (w * w).sum())

            y: Any = checkpoint(function, x, w, use_reentrant=reentrant)
            found = [y.detach()]
            (y * y).sum().backward()
            gc.collect()
            assert x.grad is not None and w.grad is not None
            found += [x.grad, w.grad]
            sent = len(record.entries)
            return same(found, derived(exchange, apart=False)), sent

    with warnings.catch_warnings():
        warnings.simplefilter("error", NotWaitedWarning)
        assert run_ranks({"tp": 2}, program) == [(True, 3)] * 2


MISUSES: list[Callable[[Any, Tensor], Any]] = [
    lambda pending, x: pending + 1,
    lambda pending, x: x + pending,
    lambda pending, x: 2 * pending,
    lambda pending, x: x @ pending,
    lambda pending, x: pending == x,
    lambda pending, x: torch.relu(pending),
    lambda pending, x: torch.cat([x, pending]),
    lambda pending, x: torch.nn.functional.linear(x, pending),
    lambda pending, x: x.add_(pending),
    lambda pending, x: pending.sum(),
    lambda pending, x: pending.shape,
    lambda pending, x: pending[0],
    lambda pending, x: len(pending),
    lambda pending, x: list(pending),
    lambda pending, x: bool(pending),
    lambda pending, x: float(pending),
    lambda pending, x: pending.numpy(),
]


@pytest.mark.parametrize("checked", [False, True])
def test_what_is_not_waited_for_is_no_tensor(checked: bool) -> None:
    with set_current_mesh({}), typecheck() if checked else nullcontext():
        x = torch.ones(2, 2)
        pending = all_to_all_start(x, "tp", V, V)
        for use in MISUSES:
            with pytest.raises(PlacementError, match="is used before it is waited for"):
                use(pending, x)
        assert not isinstance(pending, Tensor) and not hasattr(pending, "else")
        assert "under way" in repr(pending)
        pending.wait()


def test_an_annotation_says_to_wait() -> None:
    @typed
    def doubled(x: Annotated[Tensor, On(tp="V")]) -> Annotated[Tensor, On(tp="V")]:
        return x * 2

    with set_current_mesh({"tp": 2}), typecheck():
        pending = all_to_all_start(assert_type(torch.ones(2, 2), {"tp": V}), "tp", V, V)
        with pytest.raises(
            PlacementError, match=r"is Pending, expected a tensor: call its"
        ):
            doubled(pending)  # type: ignore[arg-type]
        assert doubled(pending.wait()).shape == (2, 2)


def test_waiting_twice_is_an_error() -> None:
    pending = all_to_all_start(torch.ones(2), "tp", V, V)
    pending.wait()
    with pytest.raises(PlacementError, match="was waited for already"):
        pending.wait()
    assert pending.is_waited


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_what_is_sent_may_not_be_written_to_before_the_wait(backend: str) -> None:
    for text in run_ranks({"tp": 2}, _written, backend=backend):
        assert "was written to before the wait" in text


def _written() -> str:
    with set_current_mesh(device_mesh({"tp": 2})):
        x = torch.ones(4, 2)
        pending = all_to_all_start(x, "tp", V, V)
        x.mul_(2)
        with pytest.raises(PlacementError) as caught:
            pending.wait()
    return str(caught.value)


def test_what_is_dropped_is_told_of() -> None:
    with pytest.warns(NotWaitedWarning, match=r"all_to_all at test_pending.py:\d+: the"):
        all_to_all_start(torch.ones(2), "tp", V, V)


def test_verify_tells_of_what_is_kept_and_not_waited_for() -> None:
    def program() -> None:
        with set_current_mesh(device_mesh({"tp": 2})):
            with verify():
                x = assert_type(torch.ones(4, 2), {"tp": V})
                first = all_to_all_start(x, "tp", V, V)
                second = all_to_all_start(x, "tp", V, V)
                first.wait()
            second.wait()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run_ranks({"tp": 2}, program)
    said = [str(w.message) for w in warned]
    assert len(said) == 2
    assert all(text.startswith("verify: all_to_all at test_pending") for text in said)


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_an_error_between_start_and_wait_leaves_nothing_hanging(backend: str) -> None:
    """On one rank alone: the other gets its rows, and the group can be used again."""
    assert run_ranks({"tp": 2}, _failing, backend=backend) == [[2.0, 2.0, 0], [1.0, 2.0, 0]]


def _dropping(dies: bool) -> None:
    with set_current_mesh(device_mesh({"tp": 2})):
        pending = all_to_all_start(torch.ones(2, 1), "tp", V, V)
        if dies:
            raise ValueError("between start and wait")
        pending.wait()


@pytest.mark.filterwarnings("ignore::placements.NotWaitedWarning")
def test_what_a_failed_run_dropped_is_not_waited_for_in_the_next() -> None:
    """Its group is gone; the next one has the same name, on the same threads."""
    for _ in range(3):
        with pytest.raises(RankFailure, match="between start and wait"):
            run_ranks({"tp": 2}, _dropping, True)
        gc.collect()
        run_ranks({"tp": 2}, _dropping, False)


def _failing() -> list[float]:
    from placements.collectives import pending as of_pendings

    rank = dist.get_rank()
    with set_current_mesh(device_mesh({"tp": 2})), warnings.catch_warnings():
        warnings.simplefilter("ignore", NotWaitedWarning)
        x = torch.full((2, 1), rank + 1.0)
        try:
            pending = all_to_all_start(x, "tp", V, V)
            if rank == 0:
                raise ValueError("between start and wait")
            got = pending.wait()
        except ValueError:
            got = None
        pending = None
        gc.collect()
        again = all_to_all_start(x, "tp", V, V).wait()
        by_thread = of_pendings._dropped.values()
        mine = [kept for kept in by_thread if kept.get(threading.get_ident())]
    first = again[1].item() if got is None else got[0].item()
    return [first, again[1].item(), len(mine)]


def test_pendings_are_objects_like_others() -> None:
    pending: Pending = all_to_all_start(torch.ones(2), "tp", V, V)
    assert pending in {pending} and [pending].index(pending) == 0
    with pytest.raises(AttributeError, match="has no attribute 'rows_of_mine'"):
        _ = pending.rows_of_mine
    pending.wait()
