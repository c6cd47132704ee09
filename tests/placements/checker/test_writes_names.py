"""Memory with several names: a write is refused if it makes the type of another one false."""

import copy
from collections.abc import Callable
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
    assert_type,
    axis_rank,
    convert,
    reinterpret,
    set_current_mesh,
    type_of,
    typecheck,
    unchecked,
)

LOADED = torch.ones(4)  # made outside of every block, as data is


def own() -> Tensor:
    return assert_type(torch.ones(4), {"a": V})


def same() -> Tensor:
    return assert_type(LOADED.detach(), {"a": R})


def cut() -> Tensor:
    return assert_type(torch.ones(4, 2), {"a": S(1)})


VARYING_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "z[rank]": lambda z: z[axis_rank("a")],
    "z[rank:]": lambda z: z[axis_rank("a") :],
    "chunk": lambda z: z.chunk(2)[axis_rank("a")],
    "narrow": lambda z: z.narrow(0, 0, z.shape[1]),
    "z[:n]": lambda z: z[: z.shape[1]],
    "reinterpret": lambda z: reinterpret(z, "a", src=S(1), dst=V),
    "view of a view": lambda z: z.t()[:, axis_rank("a")][:1],
}


@pytest.mark.parametrize("view", VARYING_VIEWS.values(), ids=list(VARYING_VIEWS))
@pytest.mark.parametrize("block", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_varying_view_of_a_shard_is_not_written(
    view: Callable[[Tensor], Tensor], block: Any
) -> None:
    with set_current_mesh({"a": 2}), typecheck(), block():
        z = cut()
        q = view(z)
        assert type_of(q) == {"a": V}
        with pytest.raises(PlacementError, match="another name for the memory"):
            q.zero_()
        with unchecked():
            assert bool((z == 1).all())


def test_the_written_tensor_may_be_a_keyword() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        q = cut()[axis_rank("a")]
        with pytest.raises(PlacementError, match="another name for the memory"):
            nn.functional.relu(input=q, inplace=True)


def test_views_that_are_what_the_base_is_are_written() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        z = cut()
        z[0].zero_()
        z.t()[:, 1:].mul_(3)
        z.view(2, 2, z.shape[1])[1].add_(1)
        assert type_of(z) == {"a": S(1)}
        mine = own()
        mine[axis_rank("a")].zero_()
        assert type_of(mine) == {"a": V}


def multiply_rows(z: Tensor) -> None:
    z[0 : z.shape[1]] *= 2


def add_to_the_row_of_the_rank(z: Tensor) -> None:
    z[axis_rank("a")] += 1


def add_to_the_first_column(z: Tensor) -> None:
    z[:, 0] += 1


def subtract_a_varying(z: Tensor) -> None:
    z[1] -= own()[:2]


@pytest.mark.parametrize(
    "line",
    [
        multiply_rows,
        add_to_the_row_of_the_rank,
        add_to_the_first_column,
        subtract_a_varying,
    ],
)
def test_a_refused_augmented_assignment_has_written_nothing(
    line: Callable[[Tensor], None],
) -> None:
    with set_current_mesh({"a": 2}), typecheck():
        z = cut()
        with pytest.raises(PlacementError):
            line(z)
        with unchecked():
            assert bool((z == 1).all())


def by_a_cast(src: Any, dst: Any) -> Callable[[], Any]:
    def program() -> Any:
        b = torch.zeros(4)
        y = (
            reinterpret(b, "a", src=src, dst=dst)
            if dst is P
            else convert(b, "a", src=src, dst=dst)
        )
        b.copy_(own())
        return y.clone()

    return program


def by_a_cast_and_an_element() -> Any:
    b = torch.zeros(4)
    y = convert(b, "a", src=R, dst=I)
    b[0] = own()[0]
    return y.clone()


def by_a_declared_view() -> Any:
    b = torch.zeros(4)
    y = assert_type(b.view(2, 2), {"a": R})
    b.copy_(own())
    return y.clone()


def by_a_declared_part() -> Any:
    b = torch.empty(4)
    y = assert_type(b[1:3], {"a": R})
    b[:2] = own()[:2]
    return y.clone()


def by_the_data() -> Any:
    b = torch.zeros(4)
    b.data.copy_(own())
    return b.clone()


def by_a_copy_of_fresh_memory() -> Any:
    b = torch.zeros(4)
    copy.copy(b).copy_(own())
    return b.clone()


def by_a_copy() -> Any:
    b = same()
    copy.copy(b).copy_(own())
    return b.clone()


def by_a_parameter() -> Any:
    b = same()
    with torch.no_grad():
        nn.Parameter(b).copy_(own())
    return b.clone()


def by_a_copy_that_is_declared() -> Any:
    b = same()
    assert_type(copy.copy(b), {"a": V}).copy_(own())
    return b.clone()


def by_set() -> Any:
    b = same()
    torch.empty(0).set_(b).copy_(own())  # pyright: ignore
    return b.clone()


def by_the_storage() -> Any:
    b = same()
    torch.empty(0).set_(b.untyped_storage()).copy_(own())  # pyright: ignore[reportUnknownMemberType]
    return b.clone()


def by_from_numpy() -> Any:
    b = same()
    torch.from_numpy(b.numpy()).copy_(own())
    return b.clone()


def by_as_tensor() -> Any:
    b = torch.zeros(4)
    torch.as_tensor(b.numpy()).copy_(own())
    return b.clone()


def by_a_part_of_an_array() -> Any:
    b = torch.zeros(4)
    assert_type(torch.from_numpy(b.numpy()[1:]), {"a": V}).copy_(own()[1:])
    return b.clone()


NAMES = [
    by_a_cast(R, I),
    by_a_cast(I, R),
    by_a_cast(R, P),
    by_a_cast_and_an_element,
    by_a_declared_view,
    by_a_declared_part,
    by_the_data,
    by_a_copy_of_fresh_memory,
    by_a_copy,
    by_a_parameter,
    by_a_copy_that_is_declared,
    by_set,
    by_the_storage,
    by_from_numpy,
    by_as_tensor,
    by_a_part_of_an_array,
]


@pytest.mark.filterwarnings("ignore:The given NumPy array")
@pytest.mark.parametrize("program", NAMES)
def test_another_name_is_not_made_false(program: Callable[[], Any]) -> None:
    with set_current_mesh({"a": 2}), typecheck():
        with pytest.raises(PlacementError, match=r"another name|other names"):
            program()


def test_writes_that_all_names_allow() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        b = torch.zeros(4)
        y = assert_type(b.view(2, 2), {"a": R})
        b.copy_(same())
        assert type_of(y.clone()) == {"a": R}
        whole = torch.zeros(6)
        one, other = assert_type(whole[:2], {"a": S(0)}), assert_type(whole[2:], {"a": R})
        one.mul_(assert_type(torch.ones(2), {"a": S(0)}))
        other.copy_(same())
        assert type_of(one) == {"a": S(0)} and type_of(other) == {"a": R}
        claimless = torch.zeros(4)
        seen = assert_type(claimless.view(4), {"a": V})
        claimless.copy_(own())
        assert type_of(seen.clone()) == {"a": V}
        x = same()
        copied = copy.copy(x)
        x.mul_(2)
        assert type_of(x) == {"a": R} and type_of(assert_type(copied, {"a": R})) == {"a": R}
