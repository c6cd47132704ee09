"""Collectives and casts: values, gradients and types, on real and simulated groups.

Each program runs on every rank of tp=2 (and tp=3 where sizes allow) and returns what it
computed; the expectation is computed here, from global values. That every row of the
table is adjoint to its backward is tested in tests/laws.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import placements
from placements import (
    AxisType,
    Even,
    Folded,
    I,
    P,
    Padded,
    PlacementError,
    R,
    Ragged,
    S,
    V,
    ZigZag,
    all_gather,
    all_reduce,
    all_to_all,
    assert_type,
    convert,
    join,
    ledger,
    redistribute,
    reduce_scatter,
    reinterpret,
    set_current_mesh,
    split,
    type_of,
    typecheck,
)
from placements.testing import device_mesh, run_ranks

BACKENDS = ["sim", "gloo"]


def value(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    return torch.arange(float(count)).reshape(shape).to(dtype)


def program(
    call: str,
    locals_: list[Tensor],
    src: Any,
    dst: Any,
    seeds: list[Tensor],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Any]:
    """One call with its backward, checked; (result, gradient, type)."""
    mesh = device_mesh()
    with set_current_mesh(mesh), typecheck():
        rank = mesh.get_local_rank("tp")
        x = assert_type(locals_[rank], {"tp": src}).requires_grad_()
        y = getattr(placements, call)(x, "tp", src=src, dst=dst, **options)
        known = type_of(y)
        assert known is not None
        seed = assert_type(seeds[rank], {"tp": known.dual()["tp"]})
        (grad,) = torch.autograd.grad(y, x, seed)
        assert type_of(grad) == {"tp": type_of(x).dual()["tp"]}  # type: ignore[union-attr]
    with set_current_mesh(mesh):
        erased = getattr(placements, call)(locals_[rank], "tp", src=src, dst=dst, **options)
    assert torch.equal(erased, y.detach())
    return y.detach(), grad.detach(), repr(known["tp"])


# call, src, dst, the type that results, shape of the global value, ranks
ROWS: list[tuple[str, Any, Any, str, tuple[int, ...], int]] = [
    ("all_reduce", P, R, "R", (3, 2), 2),
    ("all_reduce", P, I, "I", (3, 2), 2),
    ("all_gather", S(0), R, "R", (4, 2), 2),
    ("all_gather", S(1, Padded(5)), R, "R", (2, 5, 2), 2),
    ("all_gather", S(1, Padded(5)), I, "I", (2, 5, 2), 2),
    ("all_gather", S(0, Padded(1)), R, "R", (1, 2), 3),
    ("all_gather", S(0, Ragged(0, 4, 1)), R, "R", (5, 2), 3),
    ("all_gather", S(0, Folded(2, Padded(5))), I, "I", (10, 2), 2),
    ("all_gather", S(0, ZigZag(12)), R, "R", (12, 2), 3),
    ("all_gather", S(0, Folded(2, ZigZag(8))), I, "I", (16, 2), 2),
    ("reduce_scatter", P, S(0), "S(0)", (4, 2), 2),
    ("reduce_scatter", P, S(1, ZigZag(8)), "S(1, ZigZag(8))", (2, 8), 2),
    ("reduce_scatter", P, S(1), "S(1, Padded(5))", (2, 5), 2),
    ("reduce_scatter", P, S(0, Ragged(0, 4, 1)), "S(0, Ragged(0, 4, 1))", (5, 2), 3),
    ("all_to_all", S(0), S(1), "S(1)", (4, 6), 2),
    ("all_to_all", S(0, Padded(5)), S(1), "S(1, Padded(5))", (5, 5), 3),
    ("all_to_all", S(0, ZigZag(8)), S(1), "S(1)", (8, 4), 2),
    ("all_to_all", S(0, Padded(5)), S(1, ZigZag(8)), "S(1, ZigZag(8))", (5, 8), 2),
    ("convert", I, R, "R", (3,), 2),
    ("convert", R, I, "I", (3,), 2),
    ("convert", R, S(0), "S(0, Padded(5))", (5,), 2),
    ("convert", I, S(0), "S(0, Padded(5))", (5,), 2),
    ("convert", S(0, Padded(5)), P, "P", (5,), 2),
    ("convert", I, S(0, ZigZag(8)), "S(0, ZigZag(8))", (8,), 2),
    ("convert", S(0, ZigZag(8)), P, "P", (8,), 2),
    ("convert", R, P, "P", (3,), 2),
    ("convert", I, P, "P", (3,), 2),
    ("redistribute", P, S(0), "S(0)", (4,), 2),
    ("redistribute", S(0), R, "R", (4,), 2),
    ("redistribute", S(0), S(1), "S(1)", (4, 4), 2),
]  # fmt: skip


def gradient_type(t: Any) -> Any:
    return {"R": P, "I": I, "P": R}.get(t.letter, t)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("call", "src", "dst", "found", "shape", "ranks"), ROWS, ids=str)
def test_the_value_is_kept_forward_and_backward(
    backend: str,
    call: str,
    src: Any,
    dst: Any,
    found: str,
    shape: tuple[int, ...],
    ranks: int,
) -> None:
    mesh = {"tp": ranks}
    x, grad = value(*shape), value(*shape) + 1
    seeds = split(grad, {"tp": gradient_type(dst)}, mesh)
    results = run_ranks(
        mesh,
        program,
        call,
        split(x, {"tp": src}, mesh),
        src,
        dst,
        seeds,
        {},
        backend=backend,
    )
    assert {t for _, _, t in results} == {found}
    assert torch.equal(join([y for y, _, _ in results], {"tp": dst}, mesh), x)
    grads = [g for _, g, _ in results]
    assert torch.equal(join(grads, {"tp": gradient_type(src)}, mesh), grad)


def stacked(x: Tensor) -> list[Tensor]:
    with set_current_mesh(device_mesh()), typecheck():
        mine = assert_type(x, {"tp": V}) + torch.distributed.get_rank()
        gathered = all_gather(mine, "tp", src=V, dst=R)
        row = convert(gathered, "tp", src=R, dst=V)
        spread = convert(row, "tp", src=V, dst=P)
        reduced = reduce_scatter(spread, "tp", src=P, dst=V)
        assert type_of(gathered) == {"tp": R}
        assert type_of(row) == type_of(reduced) == {"tp": V}
        return [t.detach() for t in (mine, gathered, row, reduced)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_varying_values_are_stacked_and_unbound(backend: str) -> None:
    results = run_ranks({"tp": 2}, stacked, value(2, 3), backend=backend)
    everything = torch.stack([mine for mine, *_ in results])
    for mine, gathered, row, reduced in results:
        assert torch.equal(gathered, everything)
        assert torch.equal(row, mine) and torch.equal(reduced, mine)


SENDS = [[1, 3], [2, 0]]


def exchanged(dtype: torch.dtype) -> tuple[Tensor, Tensor, bool]:
    mesh = device_mesh()
    rank = mesh.get_local_rank("tp")
    sends, receives = SENDS[rank], [row[rank] for row in SENDS]
    with set_current_mesh(mesh), typecheck():
        rows = torch.arange(sum(sends) * 2.0).reshape(2, -1).T + 100 * rank
        x = assert_type(rows.to(dtype), {"tp": V}).requires_grad_()
        y = all_to_all(
            x, "tp", src=V, dst=V, input_split_sizes=sends, output_split_sizes=receives
        )
        loss = reinterpret((y * y).sum(), "tp", src=V, dst=P)
        loss.backward()
        grad = x.grad
        assert grad is not None
        return y.detach(), (grad / 2).detach(), torch.equal(grad / 2, x.detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_change_ranks_and_their_gradients_come_back(
    backend: str, dtype: torch.dtype
) -> None:
    results = run_ranks({"tp": 2}, exchanged, dtype, backend=backend)
    assert [y[:, 0].tolist() for y, _, _ in results] == [[0, 100, 101], [1, 2, 3]]
    assert all(same for _, _, same in results)


def awkward(dtype: torch.dtype) -> list[Tensor]:
    mesh = device_mesh()
    rank = mesh.get_local_rank("tp")
    with set_current_mesh(mesh), typecheck():
        whole = torch.arange(12.0).reshape(3, 4).to(dtype)
        x = assert_type(whole.T, {"tp": P})  # not contiguous
        total = all_reduce(x, "tp", src=P, dst=R)
        piece = reduce_scatter(x, "tp", src=P, dst=S(1))
        back = all_gather(piece, "tp", src=S(1, Padded(3)), dst=R)
        none = assert_type(whole[:0], {"tp": S(0)})
        nothing = all_gather(none, "tp", src=S(0), dst=R)
        wide = all_reduce(x, "tp", src=P, dst=I, op_dtype=torch.float32)
        assert wide.dtype == torch.float32 and rank in (0, 1)
        return [t.detach() for t in (total, back, nothing, wide)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_strides_dtypes_and_no_rows_work(backend: str, dtype: torch.dtype) -> None:
    expected = (torch.arange(12.0).reshape(3, 4).T * 2).to(dtype)
    for total, back, nothing, wide in run_ranks({"tp": 2}, awkward, dtype, backend=backend):
        assert torch.equal(total, expected) and torch.equal(back, expected)
        assert nothing.shape == (0, 4) and nothing.dtype == dtype
        assert torch.equal(wide.to(dtype), expected)


def by_group() -> tuple[Tensor, Any]:
    mesh = device_mesh()
    with set_current_mesh(mesh), typecheck(), ledger() as record:
        x = assert_type(torch.ones(2), {"tp": P})
        y = all_reduce(x, mesh.get_group("tp"), src=P, dst=R)
        assert type_of(y) == {"tp": R}
    return y, record.counts()


def test_the_axis_may_be_a_process_group() -> None:
    for y, counts in run_ranks({"tp": 2}, by_group):
        assert y.tolist() == [2, 2]
        assert counts == {("tp", "all-reduce"): 1}


def test_on_a_mesh_of_sizes_alone_types_and_shapes_result() -> None:
    with set_current_mesh({"dp": 2, "tp": 4}), typecheck(), ledger() as record:
        x = assert_type(
            torch.ones(2, 3, device="meta"), {"dp": S(0), "tp": S(1, Padded(9))}
        )
        y = all_gather(x, "tp", src=S(1, Padded(9)), dst=R)
        assert (y.shape, y.device.type) == ((2, 9), "meta")
        z = reduce_scatter(convert(y, "tp", src=R, dst=P), "tp", src=P, dst=S(1))
        assert z.shape == x.shape and type_of(z) == type_of(x)
        rows = assert_type(torch.ones(5, 3), {"dp": V, "tp": V})
        sent = all_to_all(
            rows, "tp", src=V, dst=V,
            input_split_sizes=[1, 1, 1, 2], output_split_sizes=[3, 0, 0, 4],
        )  # fmt: skip
        assert sent.shape == (7, 3)
    kinds = [(entry.axis, entry.kind, entry.nbytes) for entry in record.entries]
    assert kinds == [
        ("tp", "all-gather", 24),
        ("tp", "reduce-scatter", 96),  # 9 columns for 4 ranks travel as 12
        ("tp", "all-to-all", 60),
    ]


def test_over_an_axis_of_one_rank_nothing_is_sent() -> None:
    """Every row is in tests/laws/test_one_rank.py; here, what the types become."""
    with set_current_mesh({"dp": 2, "tp": 1}), typecheck(), ledger() as record:
        x = assert_type(torch.ones(2, 3), {"dp": S(0)})
        for y in (
            all_reduce(x, "tp", src=P, dst=R),
            all_gather(x, "tp", src=S(1), dst=I),
            reduce_scatter(x, "tp", src=P, dst=S(0)),
            convert(x, "tp", src=I, dst=R),
            reinterpret(x, "tp", src=V, dst=P),
        ):
            assert torch.equal(y, x) and type_of(y) == {"dp": S(0)}
        stack = all_gather(x, "tp", src=V, dst=R)
        assert stack.shape == (1, 2, 3) and type_of(stack) == {"dp": S(1)}
        assert type_of(convert(stack, "tp", src=R, dst=V)) == {"dp": S(0)}
        last = all_gather(x, "tp", src=V, dst=R, gather_dim=-1)
        assert last.shape == (2, 3, 1) and type_of(last) == {"dp": S(0)}
        with pytest.raises(PlacementError, match="expected a dim of 1 rows"):
            convert(x, "tp", src=R, dst=V)
        one_row = assert_type(torch.ones(1, 3), {"dp": S(0)})  # of two over dp
        with pytest.raises(PlacementError, match="expected a dim of 1 rows"):
            convert(one_row, "tp", src=R, dst=V)
    assert not record.entries


def test_without_a_mesh_every_call_is_that_of_one_device() -> None:
    """Found: zeros came back, the gradient was lost, and results were the input itself."""
    x = torch.ones(3, 2)
    assert torch.equal(all_to_all(x, "ep", src=V, dst=V), x)
    assert torch.equal(all_gather(x, "tp", src=V, dst=R), x[None])
    w = torch.ones(1, 2, requires_grad=True)
    reduce_scatter(w, "tp", src=P, dst=V).sum().backward()
    assert torch.equal(w.grad, torch.ones(1, 2))  # type: ignore[arg-type]
    summed = all_reduce(x, "tp", src=P, dst=R)
    summed.add_(1)
    redistribute(x, "tp", src=S(0), dst=R).add_(1)
    assert torch.equal(x, torch.ones(3, 2))
    assert redistribute(x, "tp", src=R, dst=R) is x


def test_on_one_rank_what_cannot_be_is_said() -> None:
    x = torch.ones(3, 2)
    with pytest.raises(ValueError, match="must have 1 rows, got 3"):
        convert(x, "tp", src=R, dst=V)
    with pytest.raises(ValueError, match=r"sends itself 3 rows, .* 2 come"):
        all_to_all(x, "tp", input_split_sizes=[3], output_split_sizes=[2])
    with pytest.raises(ValueError, match="exchanges the rows of dim 0"):
        all_to_all(torch.tensor(1.0), "tp")


def test_dims_are_counted_from_the_end_too() -> None:
    """Found: with a negative dim the cuts of other axes were moved, and a check skipped."""
    with set_current_mesh({"dp": 2, "tp": 4}), typecheck():
        x = assert_type(torch.ones(2, 3), {"dp": S(1), "tp": V})
        last = all_gather(x, "tp", src=V, dst=R, gather_dim=-1)
        assert last.shape == (2, 3, 4) and type_of(last) == {"dp": S(1), "tp": R}
        middle = all_gather(x, "tp", src=V, dst=R, gather_dim=-2)
        assert middle.shape == (2, 4, 3) and type_of(middle) == {"dp": S(2), "tp": R}
        p = assert_type(torch.ones(2, 3, 4), {"dp": S(0), "tp": P})
        row = reduce_scatter(p, "tp", src=P, dst=V, scatter_dim=-1)
        assert row.shape == (2, 3) and type_of(row) == {"dp": S(0), "tp": V}
        cut = assert_type(torch.ones(2, 4), {"dp": S(1), "tp": P})
        with pytest.raises(PlacementError, match="not be cut"):
            reduce_scatter(cut, "tp", src=P, dst=V, scatter_dim=-1)
        pieces = assert_type(torch.ones(2, 3), {"dp": S(0), "tp": S(1)})
        for dim in (1, -1):
            assert all_gather(pieces, "tp", src=S(-1), dst=R, gather_dim=dim).shape == (
                2,
                12,
            )
    with pytest.raises(ValueError, match="dim 3 is none of the 3 dims of the result"):
        all_gather(torch.ones(2, 3), "tp", src=V, dst=R, gather_dim=3)
    with pytest.raises(ValueError, match="dim -3 is none of the 2 dims of the tensor"):
        reduce_scatter(torch.ones(2, 3), "tp", src=P, dst=V, scatter_dim=-3)


def test_the_innermost_cut_is_undone_first() -> None:
    with set_current_mesh({"dp": 2, "tp": 4}), typecheck():
        x = assert_type(torch.ones(3), {"dp": S(0), "tp": S(0)})
        with pytest.raises(PlacementError, match="inner cut first"):
            all_gather(x, "dp", src=S(0), dst=R)
        y = all_gather(x, "tp", src=S(0), dst=R)
        assert all_gather(y, "dp", src=S(0), dst=R).shape == (24,)
        cut = convert(all_gather(y, "dp", src=S(0), dst=R), "tp", src=R, dst=S(0))
        assert type_of(convert(cut, "dp", src=R, dst=S(0))) == {"tp": S(0), "dp": S(0)}


def calls(x: Tensor, v: Tensor) -> dict[str, Any]:
    return {
        "all_reduce of Varying": lambda: all_reduce(v, "tp", src=V, dst=R),
        "all_reduce of Replicate": lambda: all_reduce(x, "tp", src=R, dst=I),
        "src that is not the type": lambda: all_reduce(x, "tp", src=P, dst=R),
        "no such conversion": lambda: convert(x, "tp", src=P, dst=R),
        "reinterpret of Shard as Partial": lambda: reinterpret(x, "tp", src=S(0), dst=P),
        "uneven src without its extent": lambda: all_gather(
            assert_type(torch.ones(3), {"tp": S(0, Padded(9))}), "tp", src=S(0), dst=R
        ),
        "cut of other rows": lambda: convert(x, "tp", src=R, dst=S(0, Even(8))),
        "recut of the same dim": lambda: redistribute(
            v, "tp", src=S(0), dst=S(0, Ragged(1, 1, 1, 9))
        ),
    }


@pytest.mark.parametrize("name", list(calls(torch.ones(1), torch.ones(1))))
def test_calls_that_make_no_sense_are_refused(name: str) -> None:
    with set_current_mesh({"tp": 4}), typecheck():
        x = assert_type(torch.ones(4), {"tp": R})
        v = assert_type(torch.ones(4), {"tp": V})
        with pytest.raises(PlacementError) as caught:
            calls(x, v)[name]()
        assert caught.value.axis == "tp"


@pytest.mark.parametrize("call", [reinterpret, convert, all_to_all])
def test_a_rank_that_wants_its_own_summand_is_told_where_to_begin(call: Any) -> None:
    with set_current_mesh({"tp": 2}), typecheck():
        counts = assert_type(torch.ones(4), {"tp": P})
        src = V if call is all_to_all else P
        with pytest.raises(PlacementError) as caught:
            call(counts, "tp", src=src, dst=V)
    assert "is Varying if what was summed is" in caught.value.advice


def test_bad_arguments_are_refused() -> None:
    with set_current_mesh({"tp": 4}), typecheck():
        x = assert_type(torch.ones(4), {"tp": P})
        v = assert_type(torch.ones(4), {"tp": V})
        with pytest.raises(ValueError, match="dst=R or dst=I"):
            all_reduce(x, "tp")
        with pytest.raises(ValueError, match="no axis 'ep'"):
            all_reduce(x, "ep", src=P, dst=R)
        with pytest.raises(ValueError, match="both input_split_sizes"):
            all_to_all(v, "tp", src=V, dst=V, input_split_sizes=[1] * 4)
        with pytest.raises(ValueError, match="sum to the 4 rows"):
            all_to_all(
                v, "tp", src=V, dst=V, input_split_sizes=[2] * 4, output_split_sizes=[1] * 4
            )
        with pytest.raises(ValueError, match="one entry for each of the 4 ranks"):
            all_to_all(v, "tp", src=V, dst=V, input_split_sizes=[4], output_split_sizes=[4])
        with pytest.raises(ValueError, match="names dim 1"):
            all_gather(v, "tp", src=S(1), dst=R, gather_dim=0)


def test_with_checking_off_extents_are_still_checked() -> None:
    with set_current_mesh({"tp": 4}):
        with pytest.raises(ValueError, match="gives rank 0 3"):
            all_gather(torch.ones(2), "tp", src=S(0, Padded(9)), dst=R)
        with pytest.raises(ValueError, match="cuts 8 rows"):
            convert(torch.ones(9), "tp", src=R, dst=S(0, Even(8)))


def test_pieces_without_an_extent_are_cut_as_they_are() -> None:
    """Found by the law of lockstep: where extents differ by rank, some ranks refused."""
    uneven = S(0, Padded(5))
    with set_current_mesh({"tp": 2}), typecheck():
        x = assert_type(torch.ones(3, 2), {"tp": uneven})
        assert redistribute(x, "tp", src=uneven, dst=S(0)) is x
        assert redistribute(x, "tp", src=uneven, dst=S(-2)) is x
        with pytest.raises(PlacementError, match="expected one of"):
            redistribute(x, "tp", src=uneven, dst=S(0, Ragged(1, 4)))


@pytest.mark.parametrize("of", [S(0), V], ids=str)
@pytest.mark.parametrize(("src", "dst"), [(R, I), (I, R), (R, P), (R, S(1))], ids=str)
def test_a_constant_of_a_pieces_sizes_is_no_replicate(
    of: AxisType, src: AxisType, dst: AxisType
) -> None:
    with set_current_mesh({"a": 2}), typecheck():
        ones = torch.ones_like(assert_type(torch.randn(2, 4), {"a": of}))
        with pytest.raises(PlacementError, match=r"ones is .* on axis 'a'"):
            convert(ones, "a", src=src, dst=dst)
        assert type_of(convert(torch.ones(2, 4), "a", src=R, dst=I)) == {"a": I}
