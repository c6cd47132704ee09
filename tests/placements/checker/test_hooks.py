"""Hooks of the user's that change gradients are checked, and may look at anything."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from placements import (
    I,
    P,
    PlacementError,
    R,
    S,
    V,
    all_reduce,
    assert_type,
    axis_rank,
    set_current_mesh,
    type_of,
    typecheck,
)

Hook = Callable[[Tensor], Any]
# The gradient of the leaf: R -> P, P -> R, S -> S.
TYPES = {"R": R, "P": P, "S": S(0), "I": I}


def quietly(_: Any) -> None:
    """Let a hook return nothing."""


def leaf(t: Any) -> Tensor:
    return assert_type(torch.ones(4, 3, dtype=torch.float64, requires_grad=True), {"tp": t})


def loss_of(y: Tensor) -> Tensor:
    """One number of the type Partial or Invariant."""
    total = (y if type_of(y) == {"tp": P} else y.exp()).sum()
    if type_of(total) == {"tp": R}:
        weight = assert_type(torch.ones((), dtype=torch.float64), {"tp": P})
        total = total * weight
    return total


def run(t: Any, hook: Hook, *, on_leaf: bool = True, early: bool = False) -> Tensor:
    """The gradient of a leaf, with the hook on the leaf or on what is made of it."""
    with set_current_mesh({"tp": 2}):
        x = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
        if early:
            x.register_hook(hook)
        with typecheck():
            x = assert_type(x, {"tp": t})
            y = x * 2
            if not early:
                (x if on_leaf else y).register_hook(hook)
            loss_of(y).backward()
            assert x.grad is not None
            assert type_of(x.grad) == {"tp": {"R": P, "P": R}.get(repr(t), t)}
            return x.grad


CHANGES_THE_TYPE: dict[str, tuple[Any, Hook]] = {
    "times a rank": (R, lambda g: g * axis_rank("tp")),
    "times a rank of a piece": (P, lambda g: g + axis_rank("tp")),
    "clamped": (R, lambda g: g.clamp(-1, 1)),
    "a number is added": (R, lambda g: g + 1),
    "by its norm": (S(0), lambda g: g / g.norm()),
    "a constant": (R, lambda g: torch.ones_like(g)),
    "in place by a rank": (R, lambda g: g.mul_(axis_rank("tp"))),
    "written without a result": (R, lambda g: quietly(g.mul_(axis_rank("tp")))),
    "written through a view": (R, lambda g: quietly(g[:1].add_(1))),
    "another tensor's": (S(0), lambda g: assert_type(torch.ones(4, 3), {"tp": V})),
    "no type at all": (R, lambda g: torch.from_numpy(g.detach().numpy() * 2)),
}


@pytest.mark.parametrize("where", ["leaf", "result", "before the block"])
@pytest.mark.parametrize("name", CHANGES_THE_TYPE)
def test_a_hook_that_changes_the_type_is_refused(name: str, where: str) -> None:
    t, hook = CHANGES_THE_TYPE[name]
    with pytest.raises(PlacementError) as caught:
        run(t, hook, on_leaf=where == "leaf", early=where == "before the block")
    assert "hook" in str(caught.value) or "in-place" in str(caught.value)


KEEPS_THE_TYPE: dict[str, tuple[Any, Hook]] = {
    "scaled": (R, lambda g: g * 2),
    "in place": (R, lambda g: quietly(g.mul_(2))),
    "zeros": (R, lambda g: torch.zeros_like(g)),
    "of a piece": (S(0), lambda g: g.clamp(-1, 1)),
    "of a whole": (P, lambda g: g.clamp(-1, 1)),
    "cast": (R, lambda g: g.float().double()),
    "itself": (R, lambda g: g),
    "nothing": (R, lambda g: None),
    "a partial": (R, partial(lambda k, g: g * k, 2)),
}


@pytest.mark.parametrize("where", ["leaf", "result", "before the block"])
@pytest.mark.parametrize("name", KEEPS_THE_TYPE)
def test_a_hook_that_keeps_the_type_is_accepted(name: str, where: str) -> None:
    t, hook = KEEPS_THE_TYPE[name]
    run(t, hook, on_leaf=where == "leaf", early=where == "before the block")


LOOKS: dict[str, Hook] = {
    "norm": lambda g: g.norm(),
    "number": lambda g: g.abs().max().item(),
    "numpy": lambda g: g.numpy().sum(),
    "unknown op": lambda g: torch.linalg.svd(g),
    "text": lambda g: f"{g} {g.shape}",
    "a rank": lambda g: g * axis_rank("tp"),
}


@pytest.mark.parametrize("t", TYPES.values())
@pytest.mark.parametrize("name", LOOKS)
def test_a_hook_may_look_at_anything(name: str, t: Any) -> None:
    seen: list[Any] = []
    run(t, lambda g: seen.append(LOOKS[name](g)))
    run(t, lambda g: seen.append(LOOKS[name](g)), on_leaf=False)
    assert len(seen) == 2


@pytest.mark.parametrize("t", [R, S(0)])
def test_a_hook_may_sum_what_has_no_type(t: Any) -> None:
    seen: list[Any] = []
    run(t, lambda g: seen.append(all_reduce(g.norm(), "tp", src=P, dst=R)))
    assert len(seen) == 1
    # What is made of it is no gradient, though a collective summed it.
    with pytest.raises(PlacementError, match="it returns a gradient that has no type"):
        run(t, lambda g: all_reduce(g.clamp(-1, 1).norm() * g, "tp", src=P, dst=R))
    with pytest.raises(PlacementError, match="is V on axis 'tp', expected R"):
        run(P, lambda g: all_reduce(g * axis_rank("tp"), "tp", src=P, dst=R))


def test_hooks_are_the_users_again_after_backward() -> None:
    def hook(g: Tensor) -> Tensor:
        return g * 2

    with set_current_mesh({"tp": 2}), typecheck():
        x = leaf(R)
        handle = x.register_hook(hook)
        loss_of(x).backward()
        assert list((x._backward_hooks or {}).values()) == [hook]
        handle.remove()
        x.register_hook(lambda g: g * axis_rank("tp"))
        with pytest.raises(PlacementError):
            loss_of(x).backward()
        assert len(x._backward_hooks or {}) == 1
        with pytest.raises(PlacementError, match="the hook at test_hooks"):
            torch.autograd.grad(loss_of(x), [x])
    # Outside a block nothing is checked.
    with set_current_mesh({"tp": 2}):
        torch.autograd.grad((x * 2).sum(), [x])


def after(assign: Callable[[Tensor], Any]) -> Tensor:
    with set_current_mesh({"tp": 2}), typecheck():
        x = leaf(R)
        x.register_post_accumulate_grad_hook(lambda p: quietly(assign(p)))
        loss_of(x).backward()
        assert x.grad is not None
        return x.grad


def test_a_hook_after_the_addition_may_scale_the_gradient() -> None:
    def scale(p: Tensor) -> None:
        assert p.grad is not None
        p.grad = p.grad * 2

    def scale_in_place(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(2)
        p.grad.norm()

    assert torch.equal(after(scale), after(scale_in_place))


def test_a_hook_after_the_addition_may_not_change_the_type() -> None:
    def times_rank(p: Tensor) -> None:
        assert p.grad is not None
        p.grad = p.grad * axis_rank("tp")

    def clamped(p: Tensor) -> None:
        assert p.grad is not None
        p.grad = p.grad.clamp(-1, 1)

    def in_place(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(axis_rank("tp"))

    def clamped_in_place(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.clamp_(-1, 1)

    for change in (times_rank, clamped, in_place, clamped_in_place):
        with pytest.raises(PlacementError):
            after(change)


def test_the_error_names_the_hook_and_the_axis() -> None:
    with pytest.raises(PlacementError) as caught:
        run(P, lambda g: g * axis_rank("tp"))
    assert caught.value.axis == "tp"
    assert "the hook at test_hooks.py:" in str(caught.value)
    assert "the gradient that it returns is V on axis 'tp', expected R" in str(caught.value)
    with pytest.raises(PlacementError) as caught:
        run(R, lambda g: g.clamp(-1, 1))
    assert "it returns a gradient that has no type" in str(caught.value)
    assert caught.value.axis == "tp"
    assert "clamp at test_hooks.py:" in caught.value.rule


class Doubling(nn.Module):
    """A module of two inputs and two outputs, one of each a plain number."""

    def forward(self, x: Tensor, factor: int) -> tuple[Tensor, int]:
        return x * factor, factor


def run_module(t: Any, hook: Hook, kind: str) -> None:
    """A hook of a module in backward, which gets and returns one gradient."""
    module = Doubling()
    if kind == "pre":
        module.register_full_backward_pre_hook(lambda _, outs: changed(hook, outs))
    else:
        module.register_full_backward_hook(lambda _, ins, outs: changed(hook, ins))
    with set_current_mesh({"tp": 2}), typecheck():
        x = leaf(t)
        y, _ = module(x, 2)
        loss_of(y).backward()
        assert x.grad is not None
        assert type_of(x.grad) == {"tp": {"R": P, "P": R}.get(repr(t), t)}


def changed(hook: Hook, grads: Any) -> Any:
    found = hook(grads[0])
    return None if found is None else (found, *grads[1:])


@pytest.mark.parametrize("kind", ["full", "pre"])
@pytest.mark.parametrize("name", CHANGES_THE_TYPE)
def test_a_hook_of_a_module_that_changes_the_type_is_refused(name: str, kind: str) -> None:
    with pytest.raises(PlacementError) as caught:
        run_module(*CHANGES_THE_TYPE[name], kind)
    assert "hook" in str(caught.value) or "in-place" in str(caught.value)


@pytest.mark.parametrize("kind", ["full", "pre"])
@pytest.mark.parametrize("name", KEEPS_THE_TYPE)
def test_a_hook_of_a_module_that_keeps_the_type_is_accepted(name: str, kind: str) -> None:
    run_module(*KEEPS_THE_TYPE[name], kind)


@pytest.mark.parametrize("kind", ["full", "pre"])
@pytest.mark.parametrize("name", LOOKS)
def test_a_hook_of_a_module_may_look_at_anything(name: str, kind: str) -> None:
    seen: list[Any] = []
    run_module(R, lambda g: seen.append(LOOKS[name](g)), kind)
    assert len(seen) == 1
