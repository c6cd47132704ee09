"""A module with whole parameters keeps the pieces that its declared types give to a rank."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from placements import (
    Even,
    Folded,
    I,
    P,
    Padded,
    R,
    S,
    V,
    declarations,
    global_state_dict,
    hold_pieces,
    join,
    set_current_mesh,
    type_of,
    typecheck,
)
from placements.testing import device_mesh, run_ranks

MESH = {"dp": 2, "tp": 2}


class Tied(nn.Module):
    """Two layers that share a weight, with a buffer and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(3, 4, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.arange(5.0), requires_grad=False)
        self.register_buffer("scale", torch.arange(6.0).view(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


TYPES = {
    "*.weight": {"dp": R, "tp": S(0)},
    "first.bias": {"dp": R, "tp": S(0)},
    "frozen": {"dp": R, "tp": S(0, Padded(5))},
    "*": {"dp": S(0), "tp": I},
}


def of(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in module.state_dict().items()}


def test_every_rank_holds_its_piece_and_all_pieces_are_the_whole() -> None:
    whole = Tied()

    def program(module: Tied) -> dict[str, Tensor]:
        with set_current_mesh(device_mesh()):
            hold_pieces(module, TYPES)
            assert module.second.weight is module.first.weight
            assert not module.frozen.requires_grad and module.first.weight.requires_grad
            assert declarations(module)["scale"] == {"dp": S(0), "tp": I}
            saved = global_state_dict(module)
            assert all(torch.equal(saved[name], value) for name, value in of(whole).items())
        return of(module)

    ranks = run_ranks(MESH, program, whole)
    for name, value in of(whole).items():
        key = next(
            k for k in TYPES if k == name or k == "*" or name.endswith(k.lstrip("*"))
        )
        assert torch.equal(join([r[name] for r in ranks], TYPES[key], MESH), value), name


def test_the_pieces_have_their_types_when_the_module_is_called() -> None:
    def program(module: Tied) -> None:
        with set_current_mesh(device_mesh()):
            hold_pieces(module, TYPES)
            with typecheck():
                x = torch.ones(1, 3)
                y = module(x)
                assert type_of(y) == {"dp": R, "tp": S(1)}

    run_ranks(MESH, program, Tied())


def test_two_blocks_in_one_parameter_are_cut_one_by_one() -> None:
    def program(module: nn.Linear) -> Tensor:
        with set_current_mesh(device_mesh()):
            types = {"dp": R, "tp": S(0, Folded(2, Even(4)))}
            hold_pieces(module, {"weight": types, "bias": types})
            with typecheck():
                gate, up = module(torch.ones(1, 3)).chunk(2, dim=-1)
                assert type_of(gate) == {"dp": R, "tp": S(1, Even(4))} == type_of(up)
                return (gate * up).detach()

    module = nn.Linear(3, 8)
    gate, up = module(torch.ones(1, 3)).detach().chunk(2, dim=-1)
    ranks = run_ranks(MESH, program, module)
    torch.testing.assert_close(join(ranks, {"dp": R, "tp": S(1)}, MESH), gate * up)


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ({"weight": {"dp": R, "tp": S(0)}}, "nothing is said of 'bias'"),
        ({"*": {"dp": R, "tp": R}, "wieght": {"dp": R, "tp": R}}, "no parameter or buffer 'wieght'"),
        ({"*": {"dp": R, "tp": P}}, "'weight' is to be P on axis 'tp'"),
        ({"*": {"dp": R, "tp": V}}, "'weight' is to be V on axis 'tp'"),
        ({"*": {"dp": R, "tp": S(0)}}, r"dim 0 of 'weight' has 5 rows.*S\(0, Padded\(5\)\)"),
        ({"*": {"dp": R}}, "'weight': no placement for mesh axis 'tp'"),
        ({"*": {"dp": R, "tpp": R}}, "'weight': .*'tpp'"),
        ({"*": {"dp": R, "tp": S(2)}}, r"'weight': S\(2\) names a dim"),
        ({"*": {"dp": R, "tp": S(0, Even(4))}}, "'weight': "),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_error_and_changes_nothing(
    types: dict[str, dict[str, object]], message: str
) -> None:
    module = nn.Linear(2, 5)
    weight, bias = module.weight, module.bias
    with set_current_mesh(MESH), pytest.raises(ValueError, match=message):
        hold_pieces(module, types)  # pyright: ignore[reportArgumentType]
    assert module.weight is weight and module.bias is bias
    assert not declarations(module)


def test_one_device_holds_everything() -> None:
    module = nn.Linear(2, 5)
    weight = module.weight
    with set_current_mesh({"tp": 1}):
        hold_pieces(module, {"*": {"tp": S(0)}})
    assert module.weight is weight
    assert not dist.is_initialized()
