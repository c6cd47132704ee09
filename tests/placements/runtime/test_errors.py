"""The one format of errors, as text; and names taken from the user's code."""

import pytest
import torch

from placements import (
    I,
    P,
    PlacementError,
    R,
    S,
    V,
    assert_type,
    set_current_mesh,
    type_of,
    typecheck,
)

SNAPSHOTS = {
    "partial plus replicate": (
        lambda t: t["p"] + t["r"],
        """\
add at test_errors.py:LINE: p is Partial on axis 'tp', expected Replicate
  rule      a term that is not pending the sum would be counted once per rank
  operands  p f32[4, 8]{dp:S(0), tp:P}
            r f32[4, 8]{dp:S(0), tp:R}
  fix       convert(r, 'tp', src=R, dst=P)
            forward: nothing; backward: nothing
  fix       all_reduce(p, 'tp', src=P, dst=R)
            forward: all-reduce over tp; backward: all-reduce over tp""",
    ),
    "invariant times varying": (
        lambda t: t["i"] * t["v"],
        """\
mul at test_errors.py:LINE: i is Invariant on axis 'tp', expected Replicate
  rule      Invariant mixes with nothing: its gradient would differ by rank and never be summed
  operands  i f32[4, 8]{dp:S(0), tp:I}
            v f32[4, 8]{dp:S(0), tp:V}
  fix       convert(i, 'tp', src=I, dst=R)
            forward: nothing; backward: all-reduce over tp
  fix       convert(i, 'tp', src=I, dst=S(0))
            forward: nothing; backward: all-gather over tp""",
    ),
    "mean over a cut dim": (
        lambda t: t["s"].mean(1),
        """\
mean at test_errors.py:LINE: s is S(1) on axis 'tp', expected a dim that is not cut
  rule      a mean over a dim that is cut divides by this rank's count; take the sum, \
which is Partial, and divide by the global count (global_mean)
  operands  s f32[4, 8]{dp:S(0), tp:S(1)}
  fix       convert(s, 'tp', src=S(1), dst=P)
            forward: nothing; backward: nothing
  fix       all_gather(s, 'tp', src=S(1), dst=R)
            forward: all-gather over tp; backward: reduce-scatter over tp
  fix       all_gather(s, 'tp', src=S(1), dst=I)
            forward: all-gather over tp; backward: nothing""",
    ),
}


@pytest.mark.parametrize("name", list(SNAPSHOTS))
def test_messages_are_as_reviewed(name: str) -> None:
    program, text = SNAPSHOTS[name]
    with set_current_mesh({"dp": 2, "tp": 4}), typecheck():
        p, r, i, v, s = (
            assert_type(torch.randn(4, 8), {"dp": S(0), "tp": t})
            for t in (P, R, I, V, S(1))
        )
        with pytest.raises(PlacementError) as caught:
            run(program, p=p, r=r, i=i, v=v, s=s)
    line = caught.value.where.rpartition(":")[2]
    found = str(caught.value).replace(f"test_errors.py:{line}", "test_errors.py:LINE")
    assert found == text


def run(program: object, **tensors: torch.Tensor) -> None:
    globals().update(tensors)  # names are looked up in the frame that calls the op
    try:
        program(tensors)  # type: ignore[operator]
    finally:
        for name in tensors:
            del globals()[name]


def test_the_headline_stands_alone() -> None:
    with set_current_mesh({"tp": 2}), typecheck():
        hidden = assert_type(torch.ones(2), {"tp": P})
        with pytest.raises(PlacementError) as caught:
            hidden.exp()
    headline = str(caught.value).splitlines()[0]
    for part in ("exp", "test_errors.py", "hidden", "Partial", "'tp'", "Replicate"):
        assert part in headline


def test_it_is_both_a_value_error_and_an_annotation_error() -> None:
    from jaxtyping import AnnotationError

    assert issubclass(PlacementError, AnnotationError)
    assert issubclass(PlacementError, ValueError)
    assert not issubclass(PlacementError, TypeError)  # operators would swallow it


def test_operators_do_not_swallow_the_error() -> None:
    with set_current_mesh({"tp": 2}), typecheck():
        p = assert_type(torch.ones(2, 2), {"tp": P})
        r = assert_type(torch.ones(2, 2), {"tp": R})
        for operation in (
            lambda: p + r,
            lambda: r + p,
            lambda: p - 1,
            lambda: 1 / p,
            lambda: p**2,
            lambda: p @ p,
            lambda: p > 0,
            lambda: p[p > 0],
        ):
            with pytest.raises(PlacementError):
                operation()
        assert type_of(p) == {"tp": P}
