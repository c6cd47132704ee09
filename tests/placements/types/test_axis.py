"""Types: values, text, gradients, and types of whole tensors."""

import copy
import pickle

import pytest
import torch

from placements import (
    Even,
    Folded,
    I,
    Invariant,
    Mesh,
    P,
    Padded,
    Partial,
    R,
    Ragged,
    Replicate,
    S,
    Shard,
    V,
    Varying,
    ZigZag,
    assert_type,
    set_current_mesh,
    type_of,
    typecheck,
)
from placements.runtime.declared import declared
from placements.types.axis import AxisType, dual
from placements.types.text import (
    as_axis_type,
    parse_axis_type,
    parse_described,
    parse_types,
)

ALL: list[AxisType] = [
    R,
    I,
    V,
    P,
    S(0),
    S(2, Padded(5)),
    S(1, Folded(2, Padded(5))),
    S(0, Ragged(3, 1)),
    S(0, ZigZag(16)),
    S(0, Folded(3, ZigZag(16))),
]


def test_words_and_letters_are_the_same_values() -> None:
    assert (Replicate(), Invariant(), Varying(), Partial()) == (R, I, V, P)
    assert Replicate() is R
    assert S is Shard
    assert [as_axis_type(w) for w in (Replicate, Invariant, Varying, Partial)] == [
        R,
        I,
        V,
        P,
    ]


@pytest.mark.parametrize("t", ALL, ids=repr)
def test_printing_then_parsing_gives_the_type_back(t: AxisType) -> None:
    assert parse_axis_type(repr(t)) == t
    assert repr(parse_axis_type(repr(t))) == repr(t)


@pytest.mark.parametrize("t", ALL, ids=repr)
def test_the_gradient_of_the_gradient_type_is_the_type(t: AxisType) -> None:
    assert dual(dual(t)) == t


def test_gradient_types() -> None:
    assert [dual(t) for t in (R, I, V, P, S(1))] == [P, I, V, R, S(1)]


@pytest.mark.parametrize("t", ALL, ids=repr)
def test_types_survive_copies(t: AxisType) -> None:
    assert copy.deepcopy(t) == t
    assert pickle.loads(pickle.dumps(t)) == t


def test_described_tensors_round_trip() -> None:
    for text in (
        "f32[T=6, D=8]{dp:S(0), tp:P}",
        "bf16[2, 3, 4]{dp:S(0), tp:S(1, Folded(2, Padded(5)))}",
        "i64[]{tp:R}",
    ):
        assert str(parse_described(text)) == text
    assert parse_types("{dp:S(0), tp:P}") == {"dp": S(0), "tp": P}


@pytest.mark.parametrize(
    "text", ["Q", "S", "S()", "S(0, Even)", "S(0, Padded(x))", "", "R I"]
)
def test_text_that_is_no_type_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a placement"):
        parse_axis_type(text)


@pytest.mark.parametrize("text", ["f32(2){tp:R}", "f32[2]", "[2]{tp:R}", "f32[2]{tp R}"])
def test_text_that_is_no_tensor_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        parse_described(text)


def test_a_shard_without_an_extent_equals_any_of_its_dim() -> None:
    assert S(0) == S(0, Padded(5))
    assert S(0, Even(4)) != S(0, Padded(5))
    assert S(0) != S(1)
    assert S(0) != V


MESH = Mesh({"dp": 2, "cp": 1, "tp": 4})


def test_a_tensor_type_equals_a_dict_that_says_the_same() -> None:
    t = declared(MESH, {"dp": S(0), "tp": S(-1)}, (3, 8))
    assert t == {"dp": S(0), "tp": S(1)}
    assert t == {"dp": S(0), "cp": P, "tp": S(1, Even(32))}  # size-1 axes do not count
    assert t != {"dp": S(0), "tp": S(0)}
    assert t != {"dp": S(0)}
    assert t.global_shape((3, 8)) == (6, 32)
    assert t.dual() == {"dp": S(0), "tp": S(1)}
    assert declared(MESH, {"dp": R, "tp": P}, ()).dual() == {"dp": P, "tp": R}


def test_the_order_of_the_mapping_is_the_order_of_the_cuts() -> None:
    dp_outside = declared(MESH, {"dp": S(0), "tp": S(0)}, (3,))
    tp_outside = declared(MESH, {"tp": S(0), "dp": S(0)}, (3,))
    assert dp_outside != tp_outside
    assert dp_outside == {"dp": S(0, Even(24)), "tp": S(0, Even(12))}
    assert tp_outside == {"tp": S(0, Even(24)), "dp": S(0, Even(6))}
    assert dp_outside != {"tp": S(0), "dp": S(0)}
    assert repr(tp_outside) == "{tp:S(0), dp:S(0)}"


def test_an_uneven_outer_cut_leaves_this_rank_its_own_rows_to_cut() -> None:
    mesh = Mesh({"cp": 2, "tp": 2}, coordinate={"cp": 1, "tp": 0})
    t = declared(mesh, {"cp": S(0, Padded(5)), "tp": S(0)}, (1,))
    assert t == {"cp": S(0, Padded(5)), "tp": S(0, Even(2))}


@pytest.mark.parametrize(
    ("types", "shape", "says"),
    [
        ({"dp": R}, (3,), "no placement is declared for mesh axis 'tp'"),
        ({"dp": S(1), "tp": R}, (3,), "1-dim tensor does not have"),
        ({"dp": S(0, Padded(5)), "tp": R}, (2,), "gives rank 0 3 rows"),
        ({"dp": S(0, Even(5)), "tp": R}, (2,), "does not divide over 2 ranks"),
        ({"dp": R, "tp": S(0, Ragged(1, 2))}, (1,), "not over 4"),
    ],
)
def test_declarations_that_do_not_fit_are_refused(
    types: dict[str, AxisType], shape: tuple[int, ...], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        declared(MESH, types, shape)


def test_something_else_than_a_type_is_refused() -> None:
    with pytest.raises(TypeError, match="a placement is R, I, V, P or S"):
        declared(MESH, {"dp": 3, "tp": R}, (1,))  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="number of a dim"):
        S("0")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be Even, Padded"):
        S(0, 5)  # type: ignore[arg-type]


def test_all_types_coincide_on_a_mesh_whose_axes_have_one_rank() -> None:
    with set_current_mesh({"dp": 1, "tp": 1}), typecheck():
        partial = assert_type(torch.ones(3), {"dp": P, "tp": I})
        replicated = assert_type(torch.ones(3), {"dp": R, "tp": V})
        total = torch.relu(partial) + replicated
        assert type_of(total) == {"dp": S(0), "tp": P}
