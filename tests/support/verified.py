"""A small program under verify(), and the error that it ends with."""

from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from placements import (
    I,
    On,
    P,
    PlacementError,
    R,
    S,
    all_reduce,
    assert_type,
    convert,
    declare,
    global_mean,
    load_global_state_dict,
    reduce_gradients,
    set_current_mesh,
    split,
    typed,
    verify,
)
from placements.testing import device_mesh, run_ranks

AXES = {"dp": 2, "tp": 2}

T, D, H = 4, 4, 8


class Mlp(nn.Module):
    """Megatron's MLP, with a part of it that is not trained by any rank's tokens."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.w_in_HD = nn.Parameter(torch.zeros(H // tp, D))
        self.w_out_DH = nn.Parameter(torch.zeros(D, H // tp))
        self.bias_D = nn.Parameter(torch.zeros(D))
        declare(
            self,
            {
                "w_in_HD": {"dp": R, "tp": S(0)},
                "w_out_DH": {"dp": R, "tp": S(1)},
                "bias_D": {"dp": R, "tp": I},
            },
        )

    @typed
    def forward(
        self, x_TD: Annotated[Tensor, On(dp=S(0), tp=I)]
    ) -> Annotated[Tensor, On(dp=S(0), tp=I)]:
        x_TD = convert(x_TD, "tp", src=I, dst=R)
        h_TH = linear(x_TD, self.w_in_HD).relu()
        return all_reduce(linear(h_TH, self.w_out_DH), "tp", src=P, dst=I) + self.bias_D


def built() -> Mlp:
    mlp = Mlp(device_mesh().shape[1])
    generator = torch.Generator().manual_seed(0)
    shapes = {"w_in_HD": (H, D), "w_out_DH": (D, H), "bias_D": (D,)}
    state = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    load_global_state_dict(mlp, state)
    return mlp


def tokens() -> Tensor:
    mesh = device_mesh()
    x_TD = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return split(x_TD, {"dp": S(0), "tp": I}, sizes)[mesh.get_rank()].requires_grad_()


def step(mlp: Mlp) -> None:
    x_TD = assert_type(tokens(), {"dp": S(0), "tp": I})
    y_TD = mlp(x_TD)
    count = torch.tensor(y_TD.shape[0], dtype=torch.float32)
    count = assert_type(count, {"dp": P, "tp": I})
    loss = global_mean((y_TD**2).sum(), count, "dp")
    torch.autograd.backward(loss)
    reduce_gradients(mlp)


def found(fn: Callable[[], None], backend: Any = "sim", mesh: Any = AXES) -> PlacementError:
    """The one error that every rank raises."""
    ranks = run_ranks(mesh, caught, fn, backend=backend)
    texts = {rank[0] for rank in ranks}
    assert len(texts) == 1, "all ranks report the same"
    assert ranks[0][1] is not None, texts
    return ranks[0][1]


def caught(fn: Callable[[], None]) -> tuple[str, Any]:
    with set_current_mesh(device_mesh()):
        try:
            with verify():
                fn()
        except PlacementError as error:
            fields = ("where", "name", "axis", "expected", "actual", "operands", "advice")
            return str(error), _Fields({name: getattr(error, name) for name in fields})
    return "nothing was found", None


class _Fields:
    """The fields of an error, which travel between processes."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)
