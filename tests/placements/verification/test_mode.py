"""verify() compares values across ranks once a step, and names the first lie."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from placements import (
    I,
    On,
    P,
    PlacementError,
    R,
    S,
    V,
    all_gather,
    all_reduce,
    assert_type,
    convert,
    declare,
    global_mean,
    global_state_dict,
    ledger,
    load_global_state_dict,
    reduce_gradients,
    region,
    reinterpret,
    set_current_mesh,
    split,
    type_of,
    typed,
    verify,
)
from placements.testing import RankFailure, device_mesh, run_ranks
from placements.types.extents import Padded

AXES = {"dp": 2, "tp": 2}
T, D, H = 4, 4, 8


class Mlp(nn.Module):
    """Megatron's MLP, with a part of it that is not trained by any rank's tokens."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.w_in_HD = nn.Parameter(torch.zeros(H // tp, D))
        self.w_out_DH = nn.Parameter(torch.zeros(D, H // tp))
        self.bias_D = nn.Parameter(torch.zeros(D))
        declare(
            self,
            {
                "w_in_HD": {"dp": R, "tp": S(0)},
                "w_out_DH": {"dp": R, "tp": S(1)},
                "bias_D": {"dp": R, "tp": I},
            },
        )

    @typed
    def forward(
        self, x_TD: Annotated[Tensor, On(dp=S(0), tp=I)]
    ) -> Annotated[Tensor, On(dp=S(0), tp=I)]:
        x_TD = convert(x_TD, "tp", src=I, dst=R)
        h_TH = linear(x_TD, self.w_in_HD).relu()
        return all_reduce(linear(h_TH, self.w_out_DH), "tp", src=P, dst=I) + self.bias_D


def built() -> Mlp:
    mlp = Mlp(device_mesh().shape[1])
    generator = torch.Generator().manual_seed(0)
    shapes = {"w_in_HD": (H, D), "w_out_DH": (D, H), "bias_D": (D,)}
    state = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    load_global_state_dict(mlp, state)
    return mlp


def tokens() -> Tensor:
    mesh = device_mesh()
    x_TD = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return split(x_TD, {"dp": S(0), "tp": I}, sizes)[mesh.get_rank()].requires_grad_()


def step(mlp: Mlp) -> None:
    x_TD = assert_type(tokens(), {"dp": S(0), "tp": I})
    y_TD = mlp(x_TD)
    count = assert_type(torch.tensor(float(y_TD.shape[0])), {"dp": V, "tp": I})
    count = reinterpret(count, "dp", src=V, dst=P)
    loss = global_mean((y_TD**2).sum(), count, "dp")
    torch.autograd.backward(loss)
    reduce_gradients(mlp)


def clean() -> list[tuple[str, str]]:
    with set_current_mesh(device_mesh()):
        mlp = built()
        optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)
        with ledger() as outer:
            for _ in range(3):
                with verify():
                    step(mlp)
                optimizer.step()
                optimizer.zero_grad()
        return [(entry.kind, entry.axis) for entry in outer.entries]


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_right_program_passes(dp: int, tp: int) -> None:
    sent = run_ranks({"dp": dp, "tp": tp}, clean)
    # Nothing is sent over an axis of one rank, and all ranks send the same.
    assert {axis for _, axis in sent[0]} == {
        a for a, n in (("dp", dp), ("tp", tp)) if n > 1
    }
    assert all(rank == sent[0] for rank in sent)


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_a_right_program_passes_and_records_what_it_sends(backend: Any) -> None:
    ranks = run_ranks(AXES, clean, backend=backend)
    # tp: forward, and the gradient of x; dp: total, count, gradients in two buckets.
    assert ranks[0].count(("all-reduce", "tp")) == 6
    assert ranks[0].count(("all-reduce", "dp")) == 3 * 3
    assert all(rank == ranks[0] for rank in ranks)


def found(fn: Callable[[], None], backend: Any = "sim", mesh: Any = AXES) -> PlacementError:
    """The one error that every rank raises."""
    ranks = run_ranks(mesh, caught, fn, backend=backend)
    texts = {rank[0] for rank in ranks}
    assert len(texts) == 1, "all ranks report the same"
    assert ranks[0][1] is not None, texts
    return ranks[0][1]


def caught(fn: Callable[[], None]) -> tuple[str, Any]:
    with set_current_mesh(device_mesh()):
        try:
            with verify():
                fn()
        except PlacementError as error:
            fields = ("where", "name", "axis", "expected", "actual", "operands", "advice")
            return str(error), _Fields({name: getattr(error, name) for name in fields})
    return "nothing was found", None


class _Fields:
    """The fields of an error, which travel between processes."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def missing_copy() -> None:
    """Each rank drew its own weights; nobody made them equal."""
    torch.manual_seed(dist.get_rank())
    first = assert_type(torch.ones(3), {"dp": R, "tp": R})
    weight = torch.randn(3)
    assert_type(weight, {"dp": R, "tp": R})
    assert_type(first + weight, {"dp": R, "tp": R})


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_replicas_that_differ(backend: Any) -> None:
    error = found(missing_copy, backend)
    assert error.name == "weight" and error.axis == "dp"
    assert error.where.startswith("assert_type at test_mode.py:")
    assert "ranks 0 and 2" in error.actual and "Replicate" in error.expected


def drifted() -> None:
    """One rank's bias is another: as after a step whose gradients were not reduced."""
    mlp = built()
    bias_D = torch.full((D,), 1.0 if dist.get_rank() == 3 else 0.99)
    load_global_state_dict(mlp, global_state_dict(mlp) | {"bias_D": bias_D})
    step(mlp)


def test_parameters_that_drifted_apart() -> None:
    error = found(drifted)
    assert error.name == "bias_D" and error.where.startswith("Mlp at")
    assert "ranks 2 and 3" in error.actual or "ranks 1 and 3" in error.actual


def forgotten_reduction_in_opaque_code() -> None:
    """The region claims Replicate, but returns this rank's summand; `int` hides the rank."""
    opaque = region(
        lambda h: h * (int(dist.get_rank()) % 2 + 1),
        ins=[{"dp": R, "tp": R}],
        outs={"dp": R, "tp": R},
        grads=[{"dp": P, "tp": P}],
    )
    opaque(assert_type(torch.ones(2), {"dp": R, "tp": R}))


class _Lying(torch.autograd.Function):
    """Says Invariant -> Invariant, but uses the value differently on each rank."""

    @staticmethod
    def placement_rule(x: Any) -> Any:
        return x

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * (dist.get_rank() % 2 + 1)


def wrong_backward() -> None:
    x = assert_type(torch.ones(2, requires_grad=True), {"dp": I, "tp": I})
    y: Tensor = _Lying.apply(x)  # type: ignore[assignment]
    torch.autograd.backward(assert_type(y, {"dp": I, "tp": I}).sum())


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_a_gradient_that_is_not_what_its_type_says(backend: Any) -> None:
    error = found(wrong_backward, backend)
    assert error.name == "x" and error.axis == "tp"
    assert "Invariant" in error.expected and "ranks 0 and 1" in error.actual
    assert "convert(x, 'tp', src=I, dst=R)" in error.advice


def wrong_backward_of_a_summand() -> None:
    x = assert_type(torch.ones(2, requires_grad=True), {"dp": I, "tp": P})
    y: Tensor = _Lying.apply(x)  # type: ignore[assignment]
    torch.autograd.backward(all_reduce(y.sum(), "tp", src=P, dst=I))


def test_the_gradient_of_a_partial_is_replicate() -> None:
    error = found(wrong_backward_of_a_summand)
    assert (error.name, error.axis) == ("x", "tp") and "Replicate" in error.expected


def hooks_left(block: Any) -> tuple[int, int]:
    with set_current_mesh(device_mesh()):
        mlp = built()
        with block():
            step(mlp)
        mlp.zero_grad()
        # Gradients do not reach the log of a block that has ended.
        step(mlp)
        left = mlp.w_in_HD._post_accumulate_grad_hooks or {}
        return len(left), len(mlp.bias_D._backward_hooks or {})


def test_no_hook_is_left_behind() -> None:
    # Those of reduce_gradients, which watches for additions to the reduced, are there anyway.
    assert run_ranks(AXES, hooks_left, verify) == run_ranks(AXES, hooks_left, nullcontext)


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_a_forgotten_reduction(backend: Any) -> None:
    error = found(forgotten_reduction_in_opaque_code, backend)
    assert (error.name, error.axis) == ("result", "tp")
    assert error.where.startswith("region at") and "Replicate" in error.expected


def uneven_rows() -> None:
    rows = 3 - dist.get_rank() % 2
    x = torch.zeros(rows, 2)
    assert_type(x, {"dp": I, "tp": S(0)})


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_extents_that_ranks_do_not_agree_on(backend: Any) -> None:
    error = found(uneven_rows, backend)
    assert (error.name, error.axis) == ("x", "tp")
    assert error.expected == "pieces of (3, 2) rows" and "Ragged(3, 2)" in error.advice


def declared_uneven_rows() -> None:
    rows = 3 - dist.get_rank() % 2
    x = torch.zeros(rows, 2)
    types: dict[str, Any] = {"dp": I, "tp": S(0, Padded(5))}
    assert all_gather(assert_type(x, types), "tp", src=types["tp"], dst=R).shape[0] == 5


def test_extents_that_ranks_agree_on() -> None:
    assert run_ranks(AXES, caught, declared_uneven_rows)[0][0] == "nothing was found"


def doubly_cut_rows() -> None:
    rows = (2, 1, 1, 1)[dist.get_rank()]
    assert_type(torch.zeros(rows), {"dp": S(0, Padded(5)), "tp": S(0)})


def test_extents_of_a_dim_that_two_axes_cut() -> None:
    assert run_ranks(AXES, caught, doubly_cut_rows)[0][0] == "nothing was found"


class Experts(nn.Module):
    """On a rank without tokens only the first expert takes part (B56)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(2))
        self.second = nn.Parameter(torch.ones(2))
        types = {"dp": V, "tp": S(0)}
        declare(self, {"first": types, "second": types})

    def forward(self) -> Tensor:
        y = self.first * 2
        return y if dist.get_rank() == 1 else y + self.second


def skipped_parameter() -> None:
    experts = Experts()
    torch.autograd.backward(reinterpret(experts().sum(), "dp", src=V, dst=P))


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_a_parameter_without_a_gradient(backend: Any) -> None:
    error = found(skipped_parameter, backend)
    assert error.name == "Experts.second" and error.actual == "None on rank 1"


def unused_parameter() -> str:
    mlp = built()
    extra = nn.Parameter(torch.zeros(2))
    mlp.register_parameter("extra", extra)
    declare(mlp, {"extra": {"dp": R, "tp": I}})
    with set_current_mesh(device_mesh()), pytest.raises(PlacementError) as error:
        with verify(mlp):
            step(mlp)
    return error.value.name


def test_parameters_of_a_given_module_have_full_names() -> None:
    with_module = run_ranks({"dp": 1, "tp": 2}, with_mesh, unused_parameter)
    assert with_module == ["extra", "extra"]


def with_mesh(fn: Callable[[], Any]) -> Any:
    with set_current_mesh(device_mesh()):
        return fn()


def forward_only() -> None:
    built()(assert_type(tokens(), {"dp": S(0), "tp": I}))


def test_without_backward_no_gradient_is_missed() -> None:
    assert run_ranks(AXES, caught, forward_only)[0][0] == "nothing was found"


def swapped_collectives() -> None:
    """Both ranks run two all-reduces over tp, which meet, but not the same ones."""
    x = assert_type(torch.ones(2), {"dp": I, "tp": P})
    y = assert_type(torch.ones(2), {"dp": I, "tp": P})
    if dist.get_rank() % 2:
        all_reduce(y, "tp", src=P, dst=R)
        all_reduce(x, "tp", src=P, dst=R)
    else:
        all_reduce(x, "tp", src=P, dst=R)
        all_reduce(y, "tp", src=P, dst=R)


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_ranks_that_ran_other_collectives(backend: Any) -> None:
    error = found(swapped_collectives, backend)
    assert error.axis == "tp" and error.where.startswith("all_reduce at") is False
    assert "rank 0: all-reduce at" in error.operands[0]


def skipped_collective() -> None:
    x = assert_type(torch.ones(2), {"dp": I, "tp": P})
    if dist.get_rank() != 1:
        all_reduce(x, "tp", src=P, dst=R)


def verified_skip() -> None:
    with set_current_mesh(device_mesh()), verify():
        skipped_collective()


def test_a_rank_that_skips_a_collective() -> None:
    # In simulation the ranks part at once, and are told so; no time runs out.
    with pytest.raises(RankFailure) as failure:
        run_ranks(AXES, verified_skip)
    assert "test_mode.py" in str(failure.value)


def raises_later() -> str:
    with set_current_mesh(device_mesh()):
        try:
            with verify():
                x = assert_type(torch.ones(2), {"dp": I, "tp": P})
                all_reduce(x, "tp", src=P, dst=R)
                raise RuntimeError("connection closed by peer")
        except RuntimeError as error:
            return error.__notes__[0]


def test_another_error_tells_what_the_rank_did_last() -> None:
    note = run_ranks(AXES, raises_later)[0]
    assert "started 1 collectives, the last one all-reduce at test_mode.py:" in note


def test_a_rank_that_others_do_not_meet_tells_how_far_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def timed_out(mesh: Any, log: Any) -> None:
        raise RuntimeError("connection closed by peer")

    # The package's name `verify` is the function.
    monkeypatch.setattr(
        sys.modules["placements.verification.mode"], "from_all_ranks", timed_out
    )
    with pytest.raises(RuntimeError) as caught, verify():
        assert_type(torch.ones(2), {})
    assert "this rank was at the exchange of logs" in caught.value.__notes__[0]


def lies_twice() -> None:
    """The later lie is on the axis that comes first in the mesh."""
    rank = dist.get_rank()
    x = torch.full((2,), float(rank % 2))
    assert_type(x, {"dp": R, "tp": R})
    y = torch.full((2,), float(rank))
    assert_type(y, {"dp": R, "tp": R})


def notes() -> list[str]:
    with set_current_mesh(device_mesh()):
        try:
            with verify():
                lies_twice()
        except PlacementError as error:
            return [error.name, *error.__notes__]
    return []


def test_the_first_lie_in_program_order_is_named() -> None:
    name, note = run_ranks(AXES, notes)[0]
    assert name == "x" and ": y" in note


def one_step_each() -> list[str]:
    names: list[str] = []
    with set_current_mesh(device_mesh()), verify() as mode:
        for bad in (False, True, False):
            x = torch.ones(2) * (dist.get_rank() if bad else 1)
            assert_type(x, {"dp": R, "tp": R})
            try:
                mode.check()
                names.append("clean")
            except PlacementError as error:
                names.append(error.name)
    return names


def test_each_check_is_about_the_step_since_the_last() -> None:
    assert run_ranks(AXES, one_step_each)[0] == ["clean", "x", "clean"]


def two_meshes(sparse: Any) -> None:
    x = assert_type(torch.ones(2), {"dp": I, "tp": I})
    with set_current_mesh(sparse):
        y = torch.ones(2) * (dist.get_rank() == 3)
        assert_type(y, {"edp": R, "ep": R})
    assert_type(x * 2, {"dp": I, "tp": I})


def with_sparse_mesh() -> tuple[str, Any]:
    # Made before checking starts: making a mesh is itself a computation on tensors.
    sparse = device_mesh({"edp": 1, "ep": 4})
    return caught(lambda: two_meshes(sparse))


def test_values_on_another_mesh_over_the_same_ranks() -> None:
    _, error = run_ranks(AXES, with_sparse_mesh)[0]
    assert (error.name, error.axis) == ("y", "ep") and "ranks 0 and 3" in error.actual


def sizes_alone() -> Any:
    with set_current_mesh({"dp": 2, "tp": 4}), verify():
        x = assert_type(torch.ones(2), {"dp": R, "tp": P})
        return type_of(all_reduce(x, "tp", src=P, dst=R))


def test_a_mesh_of_sizes_alone_is_type_checked() -> None:
    assert sizes_alone() == {"dp": R, "tp": R}


def test_verify_implies_typecheck() -> None:
    with set_current_mesh({"tp": 2}), pytest.raises(PlacementError, match="expected"):
        with verify():
            assert_type(torch.ones(2), {"tp": P}).relu()


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="Module or None"):
        verify("model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 0"):
        verify(rtol=-1)
