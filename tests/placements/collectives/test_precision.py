"""In which dtype collectives work: forward and backward apart, and never narrower unsaid.

Values that bfloat16 rounds show it exactly: 1 + 2**-10 becomes 1, and 256 + 1 + 1 becomes
256 where each sum is rounded, 258 where only the last one is.
"""

from contextlib import nullcontext
from typing import Annotated, Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn

import placements
from placements import (
    I,
    On,
    P,
    Padded,
    PlacementError,
    R,
    S,
    V,
    all_gather,
    all_reduce,
    all_to_all,
    assert_type,
    convert,
    ledger,
    pad_rows,
    redistribute,
    reduce_gradients,
    reduce_scatter,
    reinterpret,
    set_current_mesh,
    set_gradient_dtype,
    type_of,
    typecheck,
    typed,
)
from placements.collectives.precision import gradient_dtype
from placements.inference.transitions import TRANSITIONS, Transition
from placements.testing import device_mesh, run_ranks
from placements.types.axis import BY_LETTER, AxisType, Shard

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
FINE = 1 + 2**-10  # float32 and float64 hold it, bfloat16 does not
PARTS = (256.0, 1.0, 1.0)  # of three ranks


def name_of(row: Transition) -> str:
    return f"{row.call}-{row.src}-{row.dst}"


def types_of(row: Transition) -> dict[str, AxisType]:
    dims = {"src": 0, "dst": int(row.src == "S")}
    return {
        end: Shard(dims[end]) if letter == "S" else BY_LETTER[letter]
        for end, letter in (("src", row.src), ("dst", row.dst))
    }


def gradient(
    row: Transition,
    dtype: torch.dtype,
    seed: float,
    ranks: int,
    options: dict[str, Any],
    checked: bool = False,
) -> list[tuple[Tensor, Tensor, list[tuple[bool, str]]]]:
    """Result, gradient and (backward, dtype) of the ledger, of each rank."""
    types, call = types_of(row), getattr(placements, row.call)

    def program() -> Any:
        with set_current_mesh(device_mesh()), ledger() as record:
            x = torch.full((ranks, 2), FINE, dtype=dtype, requires_grad=True)
            with typecheck() if checked else nullcontext():
                assert_type(x, {"tp": types["src"]})
                y = call(x, "tp", **types, **options)
            (found,) = torch.autograd.grad(y, x, torch.full_like(y, seed))
        sent = [(entry.backward, entry.dtype) for entry in record.entries]
        return y.detach(), found, sent

    return run_ranks({"tp": ranks}, program)


@pytest.mark.parametrize("row", TRANSITIONS, ids=name_of)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("checked", [False, True])
def test_what_the_forward_says_does_not_touch_the_gradient(
    row: Transition, ranks: int, checked: bool
) -> None:
    plain = gradient(row, F32, FINE, ranks, {})
    options = {"op_dtype": BF16, "out_dtype": F32}
    rounded = gradient(row, F32, FINE, ranks, options, checked)
    narrow = gradient(row, BF16, FINE, ranks, {})
    for (_, g, sent), (y16, g16, sent16), (y, *_) in zip(
        plain, rounded, narrow, strict=True
    ):
        assert y16.dtype == g16.dtype == F32
        assert torch.equal(g16, g), "the gradient is rounded"
        assert torch.equal(y16, y.to(F32)), "the forward is that of bfloat16"
        assert [b for b, _ in sent16] == [b for b, _ in sent]
        assert all(dtype == ("float32" if b else "bfloat16") for b, dtype in sent16)


@pytest.mark.parametrize("row", TRANSITIONS, ids=name_of)
def test_backward_options_act_on_the_gradient_alone(row: Transition) -> None:
    plain = gradient(row, F32, FINE, 2, {})
    # What bfloat16 all the way does to the gradient, the options do too.
    narrow = gradient(row, BF16, FINE, 2, {})
    said = gradient(row, F32, FINE, 2, {"backward_options": {"op_dtype": BF16}})
    out = gradient(row, F32, FINE, 2, {"backward_options": {"out_dtype": BF16}})
    for one in zip(plain, narrow, said, out, strict=True):
        (y, g, _), (_, g16, _), (y_said, g_said, sent), (_, g_out, sent_out) = one
        assert torch.equal(y_said, y) and g_said.dtype == g_out.dtype == F32
        assert torch.equal(g_said, g16.to(F32))
        assert torch.equal(g_out, g.to(BF16).to(F32))
        assert all(dtype == ("bfloat16" if b else "float32") for b, dtype in sent)
        # A sum is done wide; what only moves may be rounded before it does.
        summed = row.dst == "R" and row.src != "R"
        assert all(
            dtype == ("bfloat16" if b and not summed else "float32")
            for b, dtype in sent_out
        )


def test_a_wider_output_is_summed_wide_and_a_narrower_one_travels_narrow() -> None:
    def program() -> Any:
        mesh = device_mesh()
        with set_current_mesh(mesh), ledger() as record:
            x = torch.tensor([PARTS[mesh.get_local_rank("tp")]], dtype=BF16)
            total = all_reduce(x, "tp", src=P, dst=R, out_dtype=F32)
            narrow = all_gather(x.to(F32), "tp", src=S(0), dst=R, out_dtype=BF16)
            summed = all_reduce(x.to(F32), "tp", src=P, dst=R, out_dtype=BF16)
        assert (narrow.dtype, summed.dtype) == (BF16, BF16)
        sent = [(entry.dtype, entry.nbytes) for entry in record.entries]
        return total.tolist(), narrow.tolist(), summed.tolist(), sent

    for total, narrow, summed, sent in run_ranks({"tp": 3}, program):
        assert (total, narrow, summed) == ([258.0], list(PARTS), [258.0])
        assert sent == [("float32", 4), ("bfloat16", 2), ("float32", 4)]


def of_three(fn: Any) -> list[Any]:
    """Run on three ranks whose gradients are 256, 1 and 1."""

    def program() -> Any:
        mesh = device_mesh()
        seed = torch.tensor([PARTS[mesh.get_local_rank("tp")]])
        with set_current_mesh(mesh), ledger() as record:
            found = fn(seed)
        return found.tolist(), [(e.dtype, e.backward) for e in record.entries]

    return run_ranks({"tp": 3}, program)


def converted(seed: Tensor, dtype: torch.dtype, **options: Any) -> Tensor:
    x = torch.zeros(1, dtype=dtype, requires_grad=True)
    y = convert(x, "tp", src=I, dst=R, **options)
    (found,) = torch.autograd.grad(y, x, seed.to(y.dtype))
    assert found.dtype == dtype
    return found


def test_a_gradient_is_summed_in_its_own_dtype_unless_it_is_said() -> None:
    wide = {"backward_options": {"op_dtype": F32}}
    for found, sent in of_three(lambda seed: converted(seed, BF16)):
        assert (found, sent) == ([256.0], [("bfloat16", True)])
    for found, sent in of_three(lambda seed: converted(seed, BF16, **wide)):
        assert (found, sent) == ([258.0], [("float32", True)])
    # The result is bfloat16, and so is its gradient; that of x is float32, and is summed so.
    for found, sent in of_three(lambda seed: converted(seed + 2**-10, F32, op_dtype=BF16)):
        assert (found, sent) == ([258.0], [("float32", True)])


def test_a_policy_says_in_which_dtype_gradients_are_summed() -> None:
    narrow = {"backward_options": {"op_dtype": BF16}}

    def inside(policy: Any, **options: Any) -> Any:
        def fn(seed: Tensor) -> Tensor:
            with set_gradient_dtype(policy):
                x = torch.zeros(1, dtype=BF16, requires_grad=True)
                y = convert(x, "tp", src=I, dst=R, **options)
            return torch.autograd.grad(y, x, seed.to(BF16))[0]  # the call is what counts

        return of_three(fn)

    assert inside(F32)[0] == ([258.0], [("float32", True)])
    assert inside({"tp": F32})[0] == ([258.0], [("float32", True)])
    assert inside({"dp": F32})[0] == ([256.0], [("bfloat16", True)])
    assert inside(F32, **narrow)[0] == ([256.0], [("bfloat16", True)])


def test_policies_nest_and_end() -> None:
    find = gradient_dtype
    assert find("tp") is None
    with set_gradient_dtype(F32):
        assert find("tp") == F32
        with set_gradient_dtype({"dp": F64}):
            assert (find("tp"), find("dp")) == (F32, F64)
        with set_gradient_dtype(None):
            assert find("tp") is None
        assert find("dp") == F32
    assert find("tp") is None
    for wrong in (torch.int64, "float32", {"tp": torch.bool}):
        with pytest.raises(ValueError, match="takes a floating-point dtype"):
            set_gradient_dtype(wrong)  # type: ignore[arg-type]
    assert find("tp") is None


def test_a_policy_is_for_sums_of_gradients_only() -> None:
    def fn(seed: Tensor) -> Tensor:
        with set_gradient_dtype(F64):
            x = seed.to(BF16).requires_grad_()
            piece = reduce_scatter(x.expand(3), "tp", src=P, dst=S(0))
            torch.autograd.grad(piece, x, torch.ones_like(piece))
            return all_reduce(x.detach(), "tp", src=P, dst=R)

    for found, sent in of_three(fn):
        assert found == [256.0]
        assert sent == [("bfloat16", False), ("bfloat16", True), ("bfloat16", False)]


def test_the_second_gradient_has_its_own_options() -> None:
    nested = {"op_dtype": F32, "backward_options": {"op_dtype": F64}}

    def fn(seed: Tensor) -> Tensor:
        x = torch.ones(1, requires_grad=True)
        y = all_reduce(x, "tp", src=P, dst=R, op_dtype=F64, backward_options=nested)  # type: ignore[arg-type]
        assert y.dtype == F64
        weight = torch.ones(1, dtype=F64, requires_grad=True)
        (first,) = torch.autograd.grad(y, x, weight, create_graph=True)
        (second,) = torch.autograd.grad(first, weight, seed)
        assert (first.dtype, second.dtype) == (F32, F64)
        return second

    for found, sent in of_three(fn):
        assert found == [258.0]
        assert [dtype for dtype, _ in sent] == ["float64", "float32", "float64"]


@typed
class Weights(nn.Module):
    w: Annotated[Float[Tensor, "N D"], On(dp=R, tp=R)]

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, 1, dtype=dtype))


def reduced(
    policy: Any, op_dtype: Any, dtype: torch.dtype, grad_dtype: Any, absent: bool
) -> Any:
    mesh = device_mesh()
    place = mesh.get_local_rank("tp")
    with set_current_mesh(mesh), ledger() as record, set_gradient_dtype(policy):
        module = Weights(dtype)
        module.w.grad_dtype = grad_dtype
        if not (absent and place == 0):
            part = PARTS[place] if mesh.get_local_rank("dp") == 0 else 0.0
            module.w.grad = torch.tensor([[part]], dtype=grad_dtype)
        reduce_gradients(module, op_dtype=op_dtype)
    assert module.w.grad is not None and module.w.grad.dtype == grad_dtype
    return module.w.grad.item(), [(e.axis, e.dtype, e.nbytes) for e in record.entries]


REDUCTIONS: dict[str, tuple[Any, ...]] = {
    "in its own dtype": (None, None, BF16, BF16, 256.0, "bfloat16 bfloat16"),
    "as the call says": (None, F32, BF16, BF16, 258.0, "float32 float32"),
    "as the policy says": (F32, None, BF16, BF16, 258.0, "float32 float32"),
    "of one axis; it stays wide": ({"dp": F32}, None, BF16, BF16, 258.0, "float32 float32"),
    "of the last axis": ({"tp": F32}, None, BF16, BF16, 258.0, "bfloat16 float32"),
    "narrow on one axis": ({"dp": BF16}, None, F32, F32, 258.0, "bfloat16 float32"),
    "the call comes first": (F64, F32, BF16, BF16, 258.0, "float32 float32"),
    "narrow, as is said": (BF16, None, F32, F32, 256.0, "bfloat16 bfloat16"),
    "float32 of bfloat16 weights": (None, None, BF16, F32, 258.0, "float32 float32"),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduce_gradients_sums_in_the_dtype_that_is_said(name: str) -> None:
    policy, op_dtype, dtype, grad_dtype, total, dtypes = REDUCTIONS[name]
    args = policy, op_dtype, dtype, grad_dtype
    sizes = {"bfloat16": 4, "float32": 8}  # the gradient, and how many ranks have one
    for found, sent in run_ranks({"dp": 2, "tp": 3}, reduced, *args, False):
        assert found == total
        assert sent == [
            (axis, one, sizes[one])
            for axis, one in zip(("dp", "tp"), dtypes.split(), strict=True)
        ]
    for found, _ in run_ranks({"dp": 2, "tp": 3}, reduced, *args, True):
        assert found == 2.0, "a rank without a gradient gets the sum, in its dtype"


def test_the_same_type_in_another_dtype() -> None:
    for checked in (False, True):
        for axes in ({"tp": 1}, {"tp": 2}):
            x = torch.full((2, 2), FINE, requires_grad=True)
            with set_current_mesh(axes), typecheck() if checked else nullcontext():
                assert_type(x, {"tp": P})
                y = redistribute(x, "tp", src=P, dst=P, op_dtype=BF16, out_dtype=F64)
                if checked:
                    assert type_of(y) == type_of(x)
                assert redistribute(x, "tp", src=P, dst=P) is x
            assert y.dtype == F64 and torch.equal(y, torch.ones(2, 2, dtype=F64))
            (found,) = torch.autograd.grad(y, x, torch.full_like(y, FINE))
            assert torch.equal(found, torch.full((2, 2), FINE))


def test_on_one_rank_dtypes_are_those_of_many() -> None:
    x = torch.full((2, 2), FINE, requires_grad=True)
    y = all_reduce(x, "tp", src=P, dst=R, op_dtype=BF16)
    assert y.dtype == BF16 and torch.equal(y, torch.ones_like(y))
    y = reinterpret(x, "tp", src=V, dst=P, backward_options={"op_dtype": BF16})
    (found,) = torch.autograd.grad(y, x, torch.full_like(y, FINE))
    assert torch.equal(y, x) and torch.equal(found, torch.ones(2, 2))
    with set_gradient_dtype(BF16):  # nothing is summed
        y = convert(x, "tp", src=I, dst=R, out_dtype=F64)
    (found,) = torch.autograd.grad(y, x, torch.full_like(y, FINE))
    assert torch.equal(found, torch.full((2, 2), FINE))


def test_wrong_options_are_refused_at_the_call() -> None:
    x = torch.ones(2)
    with pytest.raises(ValueError, match="has no 'async_op'; it takes op_dtype, out_dtype"):
        convert(x, "tp", src=I, dst=R, backward_options={"async_op": True})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(TypeError, match=r"must be a torch\.dtype, got 'bfloat16'"):
        all_reduce(x, "tp", src=P, dst=R, op_dtype="bfloat16")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"op_dtype=torch\.int64 cannot hold what torch\.fl"
    ):
        all_reduce(x, "tp", src=P, dst=R, op_dtype=torch.int64)
    with pytest.raises(ValueError, match=r"out_dtype=torch\.int32 cannot hold"):
        all_gather(x, "tp", src=S(0), dst=R, out_dtype=torch.int32)
    with pytest.raises(ValueError, match=r"backward of all_reduce: op_dtype=torch\.int64"):
        all_reduce(x, "tp", src=P, dst=R, backward_options={"op_dtype": torch.int64})
    counts = all_reduce(torch.tensor([True]), "tp", src=P, dst=R, op_dtype=torch.int64)
    assert counts.dtype == torch.int64


def test_checked_calls_take_dtypes_and_keep_what_is_known() -> None:
    with set_current_mesh({"tp": 2}), typecheck():
        x = assert_type(torch.ones(4, 2), {"tp": P})
        y = reduce_scatter(x, "tp", src=P, dst=S(0, Padded(4)), op_dtype=BF16)
        assert y.dtype == BF16 and type_of(y) == {"tp": S(0)}
        z = all_to_all(y, "tp", src=S(0), dst=S(1), out_dtype=F32)
        assert z.dtype == F32 and type_of(z) == {"tp": S(1)}
        rows, _ = pad_rows(assert_type(torch.ones(3, 2), {"tp": R}), 0, to=4)
        held = convert(rows, "tp", src=R, dst=I, op_dtype=F64)
        assert type_of(held.sum(0)) == {"tp": I}, "rows of padding hold zero still"
        with pytest.raises(
            PlacementError, match="Replicate on axis 'tp', expected Partial"
        ):
            all_reduce(
                assert_type(torch.ones(2), {"tp": R}), "tp", src=P, dst=R, op_dtype=BF16
            )


def sum_of_integers(parts: list[int], out_dtype: torch.dtype) -> float:
    with set_current_mesh(device_mesh()):
        x = torch.tensor(parts[torch.distributed.get_rank()])
        return all_reduce(x, "tp", src=P, dst=R, out_dtype=out_dtype).item()


def test_integers_are_summed_as_integers() -> None:
    parts = [2**24 + 1, -(2**24)]
    assert run_ranks({"tp": 2}, sum_of_integers, parts, F32) == [1, 1]
    parts = [70000, -69999]
    assert run_ranks({"tp": 2}, sum_of_integers, parts, torch.float16) == [1, 1]
