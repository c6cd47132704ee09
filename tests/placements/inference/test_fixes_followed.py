"""Every fix that an error offers type-checks when its text is followed."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that users give it

import placements
from placements import (
    I,
    P,
    PlacementError,
    R,
    S,
    V,
    assert_type,
    set_current_mesh,
    typecheck,
)

TYPES = {"r": R, "i": I, "p": P, "v": V, "s": S(0), "c": S(1)}
# Calls of two operands a and b, as code.
CALLS = [
    "{a} + {b}", "{a} * {b}", "torch.matmul({a}, {b})", "torch.maximum({a}, {b})",
    "torch.cat([{a}, {b}])", "F.mse_loss({a}, {b})", "F.l1_loss({a}, {b})",
    "torch.where(m, {a}, {b})", "torch.where(t, {a}, {b})", "F.linear({a}, {b})", "torch.lerp({a}, {b}, 0.5)",
]  # fmt: skip
# Calls of one operand.
UNARY = [
    "{a}.exp()", "{a}.softmax(1)", "{a}.mean(0)", "{a}.amax(1)", "{a}.cumsum(0)",
    "F.layer_norm({a}, (4,))", "{a}.var(1)", "{a}.sort(0)[0]", "{a}.norm()",
]  # fmt: skip


def cases() -> list[tuple[str, tuple[str, ...]]]:
    two = [(call, (a, b)) for call in CALLS for a in TYPES for b in TYPES]
    return [*two, *((call, (a,)) for call in UNARY for a in TYPES)]


def names() -> dict[str, Any]:
    made = {
        name: assert_type(torch.rand(4, 4, dtype=torch.float64), {"tp": t})
        for name, t in TYPES.items()
    }
    m = assert_type(torch.rand(4, 4) > 0.5, {"tp": R})
    t = assert_type(torch.rand(4, 4) > 0.5, {"tp": S(0)})
    return {**vars(placements), "torch": torch, "F": F, "m": m, "t": t, **made}


def follow(line: str, fix: str, operands: tuple[str, ...], scope: dict[str, Any]) -> None:
    """Run the line with the operands as the fix writes them."""
    if fix.startswith("global_mean("):
        eval(fix, scope)
        return
    changed = {name: name for name in (*operands, "m", "t")}
    for call in fix.split("; "):
        name = next(n for n in changed if f"({n}," in call)
        changed[name] = call
    texts = {letter: changed[name] for letter, name in zip("ab", operands, strict=False)}
    with_masks = re.sub(r"where\((\w),", lambda m: f"where({changed[m[1]]},", line)
    eval(with_masks.format(**texts), scope)


@pytest.mark.parametrize("line", [*CALLS, *UNARY])
def test_every_fix_is_accepted_when_it_is_followed(line: str) -> None:
    followed = 0
    with set_current_mesh({"tp": 2}), typecheck():
        for call, operands in cases():
            if call != line:
                continue
            scope = names()
            written = call.format(**dict(zip("ab", operands, strict=False)))
            try:
                eval(written, scope)
            except PlacementError as error:
                seen_forgetting = False
                for fix in error.fixes:
                    assert not seen_forgetting or fix.forgets, (written, error.fixes)
                    seen_forgetting = fix.forgets
                    follow(call, fix.call, operands, scope)
                    followed += 1
    assert followed


def test_a_mean_loss_of_torch_ops_is_refused_as_others_are() -> None:
    """Its settings have other names there: `reduction=1`, which nobody need write."""
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.zeros(2, 3), {"a": S(0)})
        with pytest.raises(PlacementError, match="mse_loss"):
            torch.ops.aten.mse_loss(x, x)


def test_a_mean_loss_is_first_told_global_mean() -> None:
    losses: list[Callable[..., Any]] = [F.mse_loss, F.l1_loss]
    with set_current_mesh({"dp": 2, "tp": 2}), typecheck():
        x = assert_type(torch.rand(4, 3), {"dp": S(0), "tp": R})
        y = assert_type(torch.rand(4, 3), {"dp": S(0), "tp": R})
        ids = assert_type(torch.zeros(4, dtype=torch.long), {"dp": S(0), "tp": R})
        for loss in losses:
            with pytest.raises(PlacementError) as caught:
                loss(x, y)
            assert caught.value.fixes[0].call.startswith(f"global_mean(F.{loss.__name__}(")
        with pytest.raises(PlacementError) as caught:
            F.cross_entropy(x, ids)
        fix = caught.value.fixes[0]
        assert fix.call == (
            "global_mean(F.cross_entropy(x, ids, reduction='sum'), "
            "(ids != -100).sum(), 'dp')"
        )
        scope = {**vars(placements), "torch": torch, "F": F, "x": x, "ids": ids}
        assert placements.type_of(eval(fix.call, scope)) == {"dp": I, "tp": R}


def test_the_mean_of_a_loss_that_ignores_targets_or_has_weights() -> None:
    with set_current_mesh({"dp": 2, "tp": 2}), typecheck():
        x = assert_type(torch.rand(4, 3), {"dp": S(0), "tp": R})
        v = assert_type(torch.rand(4, 3), {"dp": S(0), "tp": V})
        p = assert_type(torch.rand(4, 3), {"dp": S(0), "tp": P})
        w = assert_type(torch.rand(3), {"dp": R, "tp": R})
        ids = assert_type(torch.zeros(4, dtype=torch.long), {"dp": S(0), "tp": R})
        scope = {**vars(placements), "torch": torch, "F": F, "x": x, "ids": ids}
        with pytest.raises(PlacementError) as caught:
            F.cross_entropy(x, ids, ignore_index=-1, label_smoothing=0.1)
        fix = caught.value.fixes[0].call
        assert fix == (
            "global_mean(F.cross_entropy(x, ids, ignore_index=-1, reduction='sum', "
            "label_smoothing=0.1), (ids != -1).sum(), 'dp')"
        )
        assert placements.type_of(eval(fix, scope)) == {"dp": I, "tp": R}
        # Torch divides by the sum of the weights, by the number of rows where targets are
        # probabilities, and by all elements of what is broadcast.
        for refused in (
            lambda: F.cross_entropy(x, ids, w),
            lambda: F.cross_entropy(x, x.softmax(1)),
            lambda: F.mse_loss(x, x[:, :1]),
            lambda: F.mse_loss(x, v),
            lambda: F.mse_loss(p, p),
        ):
            with pytest.raises(PlacementError) as caught:
                refused()
            assert not any("global_mean(" in fix.call for fix in caught.value.fixes)


def test_fewer_heads_are_told_to_repeat_before_any_gather() -> None:
    with set_current_mesh({"tp": 2}), typecheck():
        q = assert_type(torch.rand(2, 4, 5, 8), {"tp": S(1)})
        k = assert_type(torch.rand(2, 2, 5, 8), {"tp": S(1)})
        v = assert_type(torch.rand(2, 2, 5, 8), {"tp": S(1)})
        scope = {**vars(placements), "torch": torch, "F": F, "q": q, "k": k, "v": v}
        with pytest.raises(PlacementError) as caught:
            F.scaled_dot_product_attention(q, k, v)
        fix = caught.value.fixes[0].call
        assert fix == "k.repeat_interleave(2, 1); v.repeat_interleave(2, 1)"
        changed = ", ".join(["q", *fix.split("; ")])
        found = eval(f"F.scaled_dot_product_attention({changed})", scope)
        assert placements.type_of(found) == {"tp": S(1)}
        with pytest.raises(PlacementError) as caught:
            torch.matmul(q, k.mT)
        assert caught.value.fixes[0].call.endswith("repeat_interleave(2, 1)")
