"""Types of whole tensors: equality, the order of cuts, declarations that do not fit."""

import pytest
import torch

from placements import (
    Even,
    I,
    Mesh,
    P,
    Padded,
    R,
    Ragged,
    S,
    V,
    assert_type,
    set_current_mesh,
    type_of,
    typecheck,
)
from placements.runtime.declared import declared
from placements.types.axis import AxisType

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
