"""Every fix that an error offers is accepted by the checker where the error was raised."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import placements
from placements import I, P, PlacementError, R, V, assert_type, type_of
from tests.support.checked import checked_on
from tests.support.router_tokens import D, K, scores, tokens

checked = checked_on(dp=2, tp=4)


def partial() -> Tensor:
    return assert_type(torch.randn(4, D), {"dp": R, "tp": P})


def of(axis_type: object) -> Tensor:
    return assert_type(torch.randn(4, D), {"dp": R, "tp": axis_type})  # type: ignore[dict-item]


def sort_along_the_cut_dim() -> None:
    x = tokens()
    x.sort(dim=1)


def scatter_along_the_cut_dim() -> None:
    s = scores()
    _, ids = s.topk(K, dim=-1)
    mask = torch.zeros_like(s) * s
    mask.scatter_(1, ids, 1.0)


def mean_over_the_cut_dim() -> None:
    x = tokens()
    x.mean(dim=1)


def partial_plus_replicate() -> None:
    p, r = partial(), of(R)
    p + r


def relu_of_partial() -> None:
    p = partial()
    torch.relu(p)


def invariant_with_varying() -> None:
    i, v = of(I), of(V)
    i * v


# program, tensor, axis, part of the rule
REFUSED: list[tuple[Callable[[], None], str, str, str]] = [
    (sort_along_the_cut_dim, "x", "tp", "order of the whole dim"),
    (scatter_along_the_cut_dim, "mask", "tp", "spread over the ranks"),
    (mean_over_the_cut_dim, "x", "tp", "divides by this rank's count"),
    (partial_plus_replicate, "p", "tp", "counted once per rank"),
    (relu_of_partial, "p", "tp", "non-linear function of a sum"),
    (invariant_with_varying, "i", "tp", "Invariant mixes with nothing"),
]


@pytest.mark.parametrize(("program", "name", "axis", "rule"), REFUSED)
def test_it_is_refused_with_tensor_axis_rule_and_a_fix_that_type_checks(
    program: Callable[[], None], name: str, axis: str, rule: str
) -> None:
    with pytest.raises(PlacementError) as caught:
        program()
    error = caught.value
    assert (error.name, error.axis) == (name, axis)
    assert rule in error.rule
    assert error.fixes
    # Every fix, evaluated where the error was raised, is accepted by the checker.
    frame = next(
        tb.frame for tb in _frames(caught) if tb.frame.f_code.co_name == program.__name__
    )
    for fix in error.fixes:
        for call in fix.call.split("; "):
            made = eval(call, vars(placements), frame.f_locals)
            assert type_of(made) is not None


def _frames(caught: pytest.ExceptionInfo[PlacementError]) -> Iterator["_Frame"]:
    trace = caught.tb
    while trace is not None:
        yield _Frame(trace.tb_frame)
        trace = trace.tb_next


class _Frame:
    def __init__(self, frame: object) -> None:
        self.frame: object = frame


def test_the_fix_for_partial_plus_replicate_is_applied_and_passes() -> None:
    p, r = partial(), of(R)
    fixed = p + placements.convert(r, "tp", src=R, dst=P)
    assert type_of(fixed) == {"dp": R, "tp": P}
    assert type_of(placements.all_reduce(fixed, "tp", src=P, dst=I)) == {"dp": R, "tp": I}


def test_a_fix_never_changes_what_an_in_place_op_writes() -> None:
    weight, grad = of(R), of(P)
    with pytest.raises(PlacementError) as caught:
        weight.sub_(grad)
    assert caught.value.fixes
    assert not any("(weight" in str(fix) for fix in caught.value.fixes)
