"""Weight norm: its kernel is called with shapes that fit, and its type is true."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from placements import (
    Mesh,
    P,
    Padded,
    PlacementError,
    R,
    S,
    V,
    assert_type,
    declare,
    join,
    set_current_mesh,
    split,
    type_of,
    typecheck,
)

WHOLE = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0)).double()


def lengths(dim: int) -> Tensor:
    shape = [n if d == dim else 1 for d, n in enumerate(WHOLE.shape)] if dim >= 0 else []
    return torch.arange(1, 1 + torch.Size(shape).numel()).double().reshape(shape)


@pytest.mark.parametrize(
    ("dim", "of_v", "of_g", "result"),
    [
        (0, R, R, R), (0, S(0), S(0), S(0)), (0, R, P, P), (0, V, R, V), (1, R, P, P),
        (2, R, R, R), (-1, R, P, P), (-1, R, R, R),
    ],
)  # fmt: skip
def test_what_is_accepted_is_that_of_one_device(
    dim: int, of_v: Any, of_g: Any, result: Any
) -> None:
    v = torch.stack([WHOLE, WHOLE + 1]) if of_v is V else WHOLE
    pieces = split(v, {"a": of_v}, {"a": 2}), split(lengths(dim), {"a": of_g}, {"a": 2})
    found: list[Tensor] = []
    for rank in range(2):
        with set_current_mesh(Mesh({"a": 2}, {"a": rank})), typecheck():
            own = assert_type(pieces[0][rank], {"a": of_v})
            g = assert_type(pieces[1][rank], {"a": of_g})
            found.append(torch._weight_norm(own, g, dim))
            assert type_of(found[-1]) == {"a": result}
    wanted = [torch._weight_norm(x, lengths(dim), dim) for x in (v if of_v is V else [v])]
    joined = found if of_v is V else [join(found, {"a": result}, {"a": 2})]
    assert all(map(torch.allclose, joined, wanted))


def test_odd_shapes_are_refused_before_torch_runs() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        v = assert_type(WHOLE.clone(), {"a": R})
        for dim, other in ((0, 1), (1, 0), (2, 0), (-1, 0), (0, -1), (3, 0), (-2, 1)):
            g = assert_type(lengths(other), {"a": R})
            with pytest.raises(PlacementError, match="do not fit together"):
                torch._weight_norm(v, g, dim)
        none = assert_type(torch.zeros(0, 3), {"a": R})
        with pytest.raises(PlacementError, match="no elements"):
            torch._weight_norm(none, assert_type(torch.zeros(0, 1), {"a": R}), 0)


def test_cut_dims_that_the_norm_looks_along_are_refused() -> None:
    row, length = WHOLE[:1].clone(), lengths(0)[:1].clone()
    with set_current_mesh({"a": 2}), typecheck():
        v = assert_type(WHOLE.clone(), {"a": S(1)})
        with pytest.raises(PlacementError, match="the norm needs all"):
            torch._weight_norm(v, assert_type(lengths(0), {"a": R}), 0)
        uneven = assert_type(row, {"a": S(0, Padded(1))})
        g = assert_type(length, {"a": S(0, Padded(1))})
        with pytest.raises(PlacementError, match="no elements"):
            torch._weight_norm(uneven, g, 0)


def test_a_convolution_whose_weight_is_normed() -> None:
    torch.manual_seed(0)
    plain = nn.Conv1d(4, 6, 3, padding=1, groups=2).double()
    layer = nn.utils.parametrizations.weight_norm(plain, name="weight", dim=2)
    declare(layer, {"*": {"a": R}})
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.randn(2, 4, 5).double(), {"a": S(0)})
        y = layer(x)
        assert type_of(y) == {"a": S(0)}
        y.square().sum().backward()
        assert {str(type_of(w.grad)) for w in layer.parameters()} == {"{a:P}"}
