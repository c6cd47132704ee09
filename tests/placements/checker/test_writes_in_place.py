"""In-place writes, views, ops that return their input, detach: as docs/behaviour.md says."""

import pytest
import torch
from torch.nn.functional import dropout, relu

from placements import I, P, PlacementError, R, S, V, assert_type, reinterpret, type_of
from tests.support.checked import checked_on
from tests.support.checked import random_of as of

checked = checked_on(tp=4)


def test_an_in_place_op_keeps_the_type_of_what_it_writes() -> None:
    x, bias = of(S(0)), of(R, 4)
    x.add_(bias).mul_(2).relu_()
    assert type_of(x) == {"tp": S(0)}
    x += bias
    assert type_of(x) == {"tp": S(0)}


def test_an_in_place_op_cannot_change_a_type() -> None:
    x, v = of(R), of(V)
    with pytest.raises(PlacementError, match="cannot change a type") as caught:
        x.add_(v)
    assert (caught.value.name, caught.value.axis) == ("x", "tp")


def test_a_refused_in_place_op_wrote_nothing() -> None:
    x, v = of(R), of(V)
    before = x.clone()
    with pytest.raises(PlacementError):
        x.add_(v)
    assert torch.equal(x, before)


def test_a_view_cannot_give_its_base_another_type() -> None:
    base, v = of(R), of(V, 4)
    row = base[0]
    with pytest.raises(PlacementError, match="other names for the same memory"):
        row.add_(v)


def test_setitem_needs_a_value_of_the_type_of_the_target() -> None:
    x, same, v = of(S(0)), of(S(0)), of(V, 4)
    x[:, 0] = 1.0
    x[:, 1] = same[:, 1]
    assert type_of(x) == {"tp": S(0)}
    with pytest.raises(PlacementError, match="rank's piece"):
        x[0] = v
    r = of(R)
    with pytest.raises(PlacementError, match="cannot change a type"):
        r[0] = v
    p = of(P)
    with pytest.raises(PlacementError, match="counted once per rank"):
        p[0] = 1.0
    p[0] = 0.0
    assert type_of(p) == {"tp": P}


def test_a_fresh_buffer_takes_the_type_of_what_is_written_first() -> None:
    for t in (R, I, V, P, S(0)):
        x = of(t)
        buffer = torch.zeros(x.shape)
        buffer.add_(x)
        assert type_of(buffer) == {"tp": t}
    empty = torch.empty(3, 4)
    empty.copy_(of(S(1)))
    assert type_of(empty) == {"tp": S(1)}
    assert type_of(torch.zeros(3, 4) + of(P)) == {"tp": P}
    with pytest.raises(PlacementError, match="constant added"):
        torch.ones(3, 4) + of(P)


def test_a_fresh_buffer_takes_the_type_of_its_parts() -> None:
    for t in (R, P, V, I):
        buffer = torch.zeros(3, 4)
        first, second = buffer[0], buffer[1]
        first.add_(of(t, 4))
        assert type_of(buffer) == {"tp": t} and type_of(second) == {"tp": t}
        second.copy_(of(t, 4))
        buffer[2] = of(t, 4)
        assert type_of(buffer * 2) == {"tp": t}
    with pytest.raises(PlacementError, match="counted once per rank"):
        torch.zeros(3, 4).copy_(of(P))[0].copy_(of(R, 4))


def test_memory_that_nobody_wrote_takes_the_type_of_its_parts() -> None:
    for t in (R, P, V):
        buffer = torch.empty(3, 4)
        buffer[0] = of(t, 4)
        assert type_of(buffer) == {"tp": t}
    x = of(S(0))
    buffer = x.new_empty(x.shape[0], 6)
    buffer[:, :4].copy_(x)
    buffer[:, 4:].copy_(x[:, :2])
    assert type_of(buffer) == {"tp": S(0)}


def test_a_part_that_does_not_fit_the_rest_leaves_the_whole_without_a_type() -> None:
    buffer = torch.ones(3, 4)
    buffer[0].copy_(of(P, 4))  # the other rows are ones, which are no summands
    assert type_of(buffer) is None
    with pytest.raises(PlacementError, match="through another name"):
        buffer + 1


def test_a_detached_name_does_not_tell() -> None:
    buffer = torch.zeros(3, 4)
    buffer.detach().add_(of(V))
    with pytest.raises(PlacementError, match="through another name"):
        buffer + 1
    buffer = torch.zeros(3, 4)
    with pytest.raises(PlacementError, match="cannot change a type"):
        buffer.data.copy_(of(V))
    buffer.data.fill_(1.0)
    with pytest.raises(PlacementError):
        buffer + of(P)  # it is no longer known to be zero


def test_a_view_that_is_older_than_a_declaration_follows_it() -> None:
    buffer = torch.zeros(3, 4)
    row = buffer[0]
    assert_type(buffer, {"tp": R})
    with pytest.raises(PlacementError, match="cannot change a type"):
        row.copy_(of(V, 4))
    assert type_of(row) == {"tp": R}


def test_a_view_of_a_fresh_buffer_follows_it() -> None:
    buffer = torch.zeros(3, 4)
    row = buffer[0]
    buffer.add_(of(V))
    assert type_of(row + 1) == {"tp": V}


def test_what_is_fresh_is_still_open_to_declaration() -> None:
    x = assert_type(torch.arange(12.0).reshape(3, 4), {"tp": S(0)})
    assert type_of(x) == {"tp": S(0)}
    y = assert_type(torch.randn(3) * 2, {"tp": P})
    assert type_of(y) == {"tp": P}
    with pytest.raises(PlacementError, match="is S\\(0\\) on axis 'tp', expected R"):
        assert_type(x * 2, {"tp": R})


def test_ops_that_return_their_input_leave_its_type() -> None:
    x = of(S(0))
    assert x.contiguous() is x
    assert x.to(torch.float32) is x
    assert type_of(x) == {"tp": S(0)}
    assert type_of(dropout(x, 0.0)) == {"tp": S(0)}
    y = relu(x, inplace=True)
    assert y is x and type_of(x) == {"tp": S(0)}


def test_a_cast_gives_another_name_and_leaves_the_old_one() -> None:
    v = of(V)
    p = reinterpret(v, "tp", src=V, dst=P)
    assert type_of(v) == {"tp": V}
    assert type_of(p) == {"tp": P}


def test_detach_and_clone_keep_the_type() -> None:
    x = of(S(1)).requires_grad_()
    for y in (x.detach(), x.clone(), x.data, x.detach().requires_grad_()):
        assert type_of(y) == {"tp": S(1)}


def test_a_stale_buffer_is_seen_in_lists_and_keywords_too() -> None:
    r, p = of(R, 1, 3), of(P, 2, 3)
    for k in range(2):
        buffer = torch.zeros(2, 3)
        row = buffer[0:1]
        if k == 0:
            torch.cat([row, r])
            torch.add(r, other=row)
            continue
        buffer.copy_(p)
        with pytest.raises(PlacementError, match="row is Partial"):
            torch.cat([row, r])
        with pytest.raises(PlacementError, match="row is Partial"):
            torch.add(r, other=row)
