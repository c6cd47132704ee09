"""assert_spmd_equivalent on functions and modules, right and wrong."""

from collections.abc import Callable
from typing import Annotated, Any

import pytest
import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor, nn

from placements import I, On, P, R, S, all_reduce, convert, declare, reinterpret, typed
from placements.testing import assert_spmd_equivalent

Rows = Annotated[Float[Tensor, "T D"], On(tp=S(0))]


def failure_of(
    fn: Callable[..., Any], reference: Callable[..., Any], **options: Any
) -> str:
    with pytest.raises(AssertionError) as failure:
        assert_spmd_equivalent(fn, reference, **{"examples": 40, **options})
    return str(failure.value)


def fails_again(text: str, **names: object) -> bool:
    """Whether the code in a failure runs and shows the same."""
    code = text[text.index("# the smallest case found") :]
    with pytest.raises(AssertionError) as failure:
        exec(code, dict(names))
    return str(failure.value) == text[: text.index("\n\n# the smallest case")]


@typed
def project(
    x_TD: Annotated[Float[Tensor, "T D"], On(tp=R)],
    w_DF: Annotated[Float[Tensor, "D F"], On(tp=S(1))],
    v_FD: Annotated[Float[Tensor, "F D"], On(tp=S(0))],
) -> Annotated[Float[Tensor, "T D"], On(tp=R)]:
    return all_reduce((x_TD @ w_DF).relu() @ v_FD, "tp", src=P, dst=R)


def reference_project(x_TD: Tensor, w_DF: Tensor, v_FD: Tensor) -> Tensor:
    return (x_TD @ w_DF).relu() @ v_FD


def test_a_megatron_pair_equals_one_device() -> None:
    assert_spmd_equivalent(project, reference_project)


@typed
def scaled(
    x_TD: Annotated[Float[Tensor, "T D"], On(tp="t")],
    y_TD: Annotated[Float[Tensor, "T D"], On(tp="t")],
) -> Annotated[Float[Tensor, "T D"], On(tp="t")]:
    return x_TD + y_TD


def test_variables_are_drawn() -> None:
    assert_spmd_equivalent(scaled, lambda x_TD, y_TD: x_TD + y_TD)


@typed
def counted_per_rank(
    x_T: Annotated[Float[Tensor, " T"], On(tp=R)],
) -> Annotated[Float[Tensor, " T"], On(tp=P)]:
    return reinterpret(x_T, "tp", src=R, dst=P)


def same(x_T: Tensor) -> Tensor:
    return x_T


def test_a_wrong_function_is_shown_as_code_that_runs() -> None:
    text = failure_of(counted_per_rank, same)
    assert "import counted_per_rank as fn" in text and "mesh={'tp': 2}" in text
    assert fails_again(text)


def test_a_lambda_is_to_be_set_in_the_code() -> None:
    text = failure_of(counted_per_rank, lambda x_T: x_T)
    assert "# reference = the <lambda> that was passed" in text
    assert fails_again(text, reference=lambda x_T: x_T)


class Column(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w_DF = nn.Parameter(torch.arange(12.0, dtype=torch.float64).reshape(3, 4))

    @typed
    def forward(
        self, x_TD: Annotated[Float[Tensor, "T 3"], On(tp=I)]
    ) -> Annotated[Float[Tensor, "T F"], On(tp=S(1))]:
        return convert(x_TD, "tp", src=I, dst=R) @ self.w_DF


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w_DF = nn.Parameter(torch.arange(12.0, dtype=torch.float64).reshape(3, 4))

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD @ self.w_DF


def test_a_module_and_its_parameters() -> None:
    column = Column()
    declare(column, {"w_DF": {"tp": S(1)}})
    assert_spmd_equivalent(column, Plain(), max_ranks=2)


class Twice(Plain):
    def forward(self, x_TD: Tensor) -> Tensor:
        return super().forward(x_TD) * 2


def test_a_wrong_module_is_shown_as_code_that_runs() -> None:
    column = Column()
    declare(column, {"w_DF": {"tp": S(1)}})
    text = failure_of(nn.Sequential(column)[0], Twice())
    assert fails_again(text, fn=column, reference=Twice())


class Deep(nn.Module):
    """Two collectives: a rank goes on after others have begun."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ParameterDict(
            {f"w{k}": torch.arange(8.0).reshape(4, 2) - k for k in range(2)}
        )
        self.register_buffer("calls", torch.zeros(()))

    @typed
    def forward(
        self, x_TD: Annotated[Float[Tensor, "T D"], On(tp=S(1))]
    ) -> Annotated[Float[Tensor, "T F"], On(tp=R)]:
        self.calls.add_(1)
        y_TF = all_reduce(x_TD @ self.inner["w0"], "tp", src=P, dst=R)
        z_TF = all_reduce(x_TD @ self.inner["w1"], "tp", src=P, dst=R)
        return y_TF * z_TF * self.calls


class PlainDeep(Deep):
    def forward(self, x_TD: Tensor) -> Tensor:
        self.calls.add_(1)
        return x_TD @ self.inner["w0"] * (x_TD @ self.inner["w1"]) * self.calls


def test_every_rank_and_case_has_its_own_module() -> None:
    deep, plain = Deep(), PlainDeep()
    cut = {"tp": S(0)}
    declare(deep, {"inner.w0": cut, "inner.w1": cut, "calls": {"tp": R}})
    assert_spmd_equivalent(deep, plain, sizes={"D": 4}, examples=40)
    assert not deep.calls and not plain.calls


class Unreduced(torch.autograd.Function):
    @staticmethod
    def placement_rule(x: Any) -> Any:
        return dict.fromkeys(x, R)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@typed
def unreduced(
    x_TD: Annotated[Float[Tensor, "T D"], On(tp=I)],
    w_DF: Annotated[Float[Tensor, "D F"], On(tp=S(1))],
) -> Annotated[Float[Tensor, "T F"], On(tp=S(1))]:
    return Unreduced.apply(x_TD) @ w_DF


def product(x_TD: Tensor, w_DF: Tensor) -> Tensor:
    return x_TD @ w_DF


def test_a_missing_reduction_in_the_backward_is_named() -> None:
    text = failure_of(unreduced, product)
    assert text.startswith("the gradient of x_TD is no global value") and "rank 1:" in text
    assert fails_again(text)


@typed
def by_rank(x_TD: Annotated[Float[Tensor, "T D"], On(tp=R)]) -> Tensor:
    return x_TD * (2 if f"{dist.get_rank():d}" == "0" else 3)


def test_results_that_differ_by_rank_are_one_failure() -> None:
    text = failure_of(by_rank, lambda x_TD: x_TD * 2)
    assert text.startswith("result 0 is no global value") and "mesh={'tp': 2}" in text


@typed
def wrong_mean(x_TD: Rows) -> Annotated[Float[Tensor, ""], On(tp=I)]:
    total = all_reduce(x_TD.sum(), "tp", src=P, dst=I)
    return total / (x_TD.shape[0] * x_TD.shape[1] or 1)


def test_a_divisor_that_counts_local_rows_is_found() -> None:
    text = failure_of(wrong_mean, lambda x_TD: x_TD.sum() / (x_TD.numel() or 1))
    assert "result 0 is not that of one device" in text or "global_size(" in text


@typed
def chosen(
    w_VD: Annotated[Float32[Tensor, "V D"], On(tp=R)],
    ids_T: Annotated[Int[Tensor, " T"], On(tp=S(0))],
    kept_T: Annotated[Bool[Tensor, " T"], On(tp=S(0))],
) -> Annotated[Float32[Tensor, "T D"], On(tp=S(0))]:
    return nn.functional.embedding(ids_T, w_VD) * kept_T.unsqueeze(1)


def on_one_device(w_VD: Tensor, ids_T: Tensor, kept_T: Tensor) -> Tensor:
    assert (w_VD.dtype, ids_T.dtype) == (torch.float32, torch.int64)
    return w_VD[ids_T] * kept_T.unsqueeze(1)


def ids(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(3, shape, generator=generator)


def test_dtypes_are_those_of_the_annotations() -> None:
    values = {"ids_T": ids}
    assert_spmd_equivalent(
        chosen, on_one_device, sizes={"V": 3}, values=values, examples=40
    )
    text = failure_of(chosen, on_one_device, sizes={"V": 3})
    assert "IndexError" in text and "values={'ids_T'" in text


@typed
def shifted(
    x_TD: Rows, b_D: Annotated[Float[Tensor, " D"], On(tp=R)] | None = None
) -> dict[str, Any]:
    return {"y": x_TD if b_D is None else x_TD + b_D, "rest": (None, [x_TD * 2])}


def shifted_back(x_TD: Tensor, b_D: Tensor | None = None) -> dict[str, Any]:
    y_TD = x_TD if b_D is None else x_TD - b_D
    return {"y": y_TD, "rest": (None, [x_TD * 2])}


def test_optional_arguments_are_drawn_and_nested_results_compared() -> None:
    plain: Any = shifted
    assert_spmd_equivalent(shifted, plain.__wrapped__, examples=40)
    assert "the reference raised TypeError" in failure_of(shifted, lambda y_TD: y_TD)
    text = failure_of(shifted, shifted_back)
    assert "'b_D': (torch.tensor(" in text and fails_again(text)
    assert "another structure" in failure_of(shifted, lambda x_TD, b_D=None: x_TD)


@typed
def on_two_axes(
    x_TD: Annotated[Float[Tensor, "T D"], On(dp=S(0))],
) -> Annotated[Float[Tensor, "T D"], On(dp=S(0), tp=P)]:
    return x_TD * 2


def test_axes_of_the_result_are_drawn() -> None:
    text = failure_of(on_two_axes, lambda x_TD: x_TD * 2)
    assert "no case with more than one rank on axis 'tp'" in text and "on_two_axes" in text
