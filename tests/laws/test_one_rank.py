"""On an axis of one rank every transition is that of one device, for every row.

Values, gradients, second gradients and memory; without a mesh, on meshes of sizes and of
devices, by name and by process group; checked and unchecked. Nothing here knows the
actions of the table: what is expected follows from the types of a row alone, and what
shares memory from the same call on two ranks.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import placements
from placements import Mesh, Ragged, assert_type, ledger, set_current_mesh, typecheck
from placements.inference.transitions import TRANSITIONS, Transition
from placements.testing import device_mesh, run_ranks
from placements.types.axis import BY_LETTER, AxisType, Shard

DP: dict[str, AxisType] = {"dp": BY_LETTER["R"]}

# One of the places is a block without a mesh, which says so.
pytestmark = pytest.mark.filterwarnings("ignore::placements.UncheckedWarning")


def whole(row: Transition) -> Tensor:
    """An input that one row per rank can be taken from, where a row takes one."""
    takes_a_row = row.call != "reinterpret" and row.src != "V" and row.dst == "V"
    x = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(4, 3).T  # not contiguous
    return x[None] if takes_a_row else x


def types_of(row: Transition) -> tuple[AxisType, AxisType]:
    dims = {"src": 0, "dst": int(row.src == "S")}
    src, dst = (
        Shard(dims[end]) if letter == "S" else BY_LETTER[letter]
        for end, letter in (("src", row.src), ("dst", row.dst))
    )
    return src, dst


def called(row: Transition, x: Tensor, axis: Any, **options: Any) -> Tensor:
    src, dst = types_of(row)
    return getattr(placements, row.call)(x, axis, src=src, dst=dst, **options)


def expected(row: Transition, x: Tensor) -> Tensor:
    """The value of one local: of a Varying one it has a dim of one row."""
    if row.call == "reinterpret":
        return x
    value = x[None] if row.src == "V" else x
    return value[0] if row.dst == "V" else value


def share(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


@cache
def is_cast(row: Transition) -> bool:
    """Whether the result is another name for the input, on the first of two ranks."""

    def program() -> bool:
        with set_current_mesh(device_mesh()):
            x = torch.ones(2, 2)
            return share(x, called(row, x, "tp"))

    return run_ranks({"tp": 2}, program)[0]


def check_one_rank(row: Transition, axis: Any, types: dict[str, AxisType]) -> None:
    """AssertionError unless the row over `axis` does what one device does."""
    for checked in (False, True):
        x = whole(row).detach().requires_grad_()
        with typecheck() if checked else nullcontext(), ledger() as record:
            if checked and types:
                assert_type(x, types)
            y = called(row, x, axis)
        wanted = expected(row, x.detach())
        assert torch.equal(y, wanted) and y.dtype == x.dtype and y.requires_grad
        assert share(x, y) == is_cast(row), "memory"
        assert not record.entries
        (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        assert torch.equal(first, 3 * x**2)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert torch.equal(second, 6 * x)
        before = x.detach().clone()
        with torch.no_grad(), typecheck() if checked else nullcontext():
            plain = x.detach()
            if checked and types:
                assert_type(plain, types)
            z = called(row, plain, axis)
        assert not z.requires_grad
        if not is_cast(row):
            z.add_(1)
            assert torch.equal(x, before), "the result is the input's memory"


def on_device_mesh(row: Transition, sizes: dict[str, int], by_group: bool) -> None:
    def program() -> None:
        mesh = device_mesh()
        axis = mesh.get_group("tp") if by_group else "tp"
        with set_current_mesh(mesh):
            check_one_rank(row, axis, {a: t for a, t in DP.items() if a in sizes})

    run_ranks(sizes, program)


def on_group_alone(row: Transition) -> None:
    run_ranks({"tp": 1}, lambda: check_one_rank(row, device_mesh().get_group("tp"), {}))


def on_sizes(row: Transition, sizes: dict[str, int]) -> None:
    with set_current_mesh(sizes):
        check_one_rank(row, "tp", {axis: t for axis, t in DP.items() if axis in sizes})


PLACES: dict[str, Callable[[Transition], None]] = {
    "no mesh": lambda row: check_one_rank(row, "tp", {}),
    "sizes": lambda row: on_sizes(row, {"tp": 1}),
    "sizes, with a larger axis": lambda row: on_sizes(row, {"dp": 2, "tp": 1}),
    "devices": lambda row: on_device_mesh(row, {"tp": 1}, False),
    "devices, with a larger axis": lambda row: on_device_mesh(
        row, {"dp": 2, "tp": 1}, False
    ),
    "a group of the mesh": lambda row: on_device_mesh(row, {"dp": 2, "tp": 1}, True),
    "a group": on_group_alone,
}


def name_of(row: Transition) -> str:
    return f"{row.call}-{row.src}-{row.dst}"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("row", TRANSITIONS, ids=name_of)
def test_one_rank_is_one_device(row: Transition, place: str) -> None:
    is_cast(row)  # ranks do not start ranks
    PLACES[place](row)


@pytest.mark.parametrize("row", TRANSITIONS, ids=name_of)
def test_on_one_rank_functional_transforms_work(row: Transition) -> None:
    x = whole(row)
    first = torch.func.grad(lambda x: (called(row, x, "tp") ** 3).sum())(x)
    assert torch.equal(first, 3 * x**2)
    both = torch.vmap(lambda x: called(row, x, "tp"))(torch.stack([x, x + 1]))
    assert torch.equal(both[1], expected(row, x + 1))


@pytest.mark.parametrize("row", TRANSITIONS, ids=name_of)
def test_extents_of_several_ranks_do_not_matter_on_one(row: Transition) -> None:
    """All types coincide there, so a program may name the cut that it has elsewhere."""
    src, dst = (
        Shard(t.dim, Ragged(1, 1)) if isinstance(t, Shard) else t for t in types_of(row)
    )
    x = whole(row)
    y = getattr(placements, row.call)(x, "tp", src=src, dst=dst)
    assert torch.equal(y, expected(row, x))


@pytest.mark.parametrize(
    "row", [row for row in TRANSITIONS if "S" in (row.src, row.dst)], ids=name_of
)
def test_dims_count_from_the_end(row: Transition) -> None:
    """S(-1) is the last dim: types and values as for S(1)."""
    src, dst = types_of(row)
    ends = [Shard(t.dim - 2, t.extent) if isinstance(t, Shard) else t for t in (src, dst)]
    results: list[list[Any]] = []
    for one, other in ((src, dst), ends):

        def program(one: AxisType = one, other: AxisType = other) -> list[Any]:
            with set_current_mesh(device_mesh()), typecheck(), ledger() as record:
                x = assert_type(torch.arange(4.0).reshape(2, 2), {"tp": src})
                y = getattr(placements, row.call)(x, "tp", src=one, dst=other)
            return [y.tolist(), placements.type_of(y), len(record.entries)]

        results.append(run_ranks({"tp": 2}, program))
    for plain, counted in zip(*results, strict=True):
        assert plain[0] == counted[0] and plain[2] == counted[2]
        assert repr(plain[1]) == repr(counted[1])


def test_a_mesh_of_sizes_still_gives_shapes_alone() -> None:
    """Several ranks without a group: nothing is sent, so no other rank's values come."""
    row = next(t for t in TRANSITIONS if (t.call, t.src, t.dst) == ("all_gather", "V", "R"))
    with set_current_mesh(Mesh({"tp": 2})), typecheck():
        y = called(row, assert_type(torch.ones(3), {"tp": BY_LETTER["V"]}), "tp")
    assert y.shape == (2, 3)


def two_leaves(row: Transition, checked: bool) -> tuple[list[Any], list[Any]]:
    """Gradients of two leaves that take the same way, and of one alone; two passes."""

    def backward(*leaves: Tensor) -> None:
        with typecheck() if checked else nullcontext():
            src = types_of(row)[0]
            ys = [called(row, assert_type(x, {"tp": src}), "tp") for x in leaves]
            y = ys[0] if len(ys) == 1 else ys[0] + ys[1]
        weights = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).reshape(y.shape)
        (y * weights).sum().backward()

    mesh = device_mesh()
    with set_current_mesh(mesh):
        a, b, alone = (
            torch.ones(mesh.size(), 2, dtype=torch.float64, requires_grad=True)
            for _ in range(3)
        )
        for _ in range(2):
            backward(a, b)
            backward(alone)
        assert a.grad is not None and b.grad is not None and alone.grad is not None
        found = [a.grad.tolist(), b.grad.tolist()]
        assert not share(a.grad, b.grad)
        return found, [alone.grad.tolist()] * 2


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("row", TRANSITIONS, ids=name_of)
def test_gradients_of_two_leaves_are_two_memories(
    row: Transition, ranks: int, checked: bool
) -> None:
    for found, wanted in run_ranks({"tp": ranks}, two_leaves, row, checked):
        assert found == wanted
