"""Regions: code with stated types, of which the checker checks what it can."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from placements import I, P, PlacementError, R, S, assert_type, region, type_of, typecheck
from tests.support.checked import mesh_of

mesh = mesh_of(tp=4)


def experts(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, w)


def test_a_region_checks_what_it_can_and_stamps_the_rest() -> None:
    opaque = region(
        lambda x: torch.special.i0(x),
        ins=[{"tp": S(0)}], grads=[{"tp": S(0)}], outs={"tp": S(0)},
    )  # fmt: skip
    known = region(
        experts,
        ins=[{"tp": R}, {"tp": S(0)}],
        grads=[{"tp": P}, {"tp": S(0)}],
        outs={"tp": S(1)},
    )
    lie = region(
        experts,
        ins=[{"tp": R}, {"tp": S(0)}],
        grads=[{"tp": P}, {"tp": S(0)}],
        outs={"tp": R},
    )
    with typecheck():
        x = assert_type(torch.randn(3, 8), {"tp": R})
        w = assert_type(torch.randn(4, 8), {"tp": S(0)})
        assert type_of(known(x, w)) == {"tp": S(1)}
        assert type_of(opaque(w)) == {"tp": S(0)}
        with pytest.raises(PlacementError, match="is S\\(1\\) on axis 'tp', expected R"):
            lie(x, w)


def test_the_gradient_type_of_a_region_has_no_default_and_must_be_the_dual() -> None:
    with pytest.raises(TypeError, match="grads"):
        region(experts, ins=[{"tp": R}, {"tp": S(0)}], outs={"tp": S(1)})  # type: ignore[call-arg]
    wrong = region(
        experts,
        ins=[{"tp": R}, {"tp": S(0)}],
        grads=[{"tp": R}, {"tp": S(0)}],
        outs={"tp": S(1)},
    )
    with typecheck():
        x = assert_type(torch.randn(3, 8), {"tp": R})
        w = assert_type(torch.randn(4, 8), {"tp": S(0)})
        with pytest.raises(
            PlacementError, match="already complete belongs to an Invariant"
        ):
            wrong(x, w)


def test_an_invariant_input_of_a_region_is_refused_inside() -> None:
    body = region(
        experts,
        ins=[{"tp": I}, {"tp": S(0)}],
        grads=[{"tp": I}, {"tp": S(0)}],
        outs={"tp": S(1)},
    )
    with typecheck():
        x = assert_type(torch.randn(3, 8), {"tp": I})
        w = assert_type(torch.randn(4, 8), {"tp": S(0)})
        with pytest.raises(PlacementError, match="Invariant mixes with nothing"):
            body(x, w)


def test_settings_go_by_keyword_and_tensors_by_position() -> None:
    def scaled(x: Tensor, factor: float = 1.0, shift: object = None) -> Tensor:
        return x * factor

    declared = region(scaled, ins=[{"tp": R}], grads=[{"tp": P}], outs={"tp": R})
    with typecheck():
        x = assert_type(torch.randn(3), {"tp": R})
        y = declared(x, factor=2.0)
        assert type_of(y) == {"tp": R} and torch.equal(y, 2 * x)
        with pytest.raises(ValueError, match=r"shift= is a tensor.*pass it by position"):
            declared(x, shift=[x])
