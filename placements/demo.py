"""`python -m placements demo`: a tensor-parallel MLP, right and wrong, on one page."""

from typing import Annotated

import torch
from jaxtyping import Float
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear, silu

from placements.annotations.declarations import assert_type, type_of
from placements.annotations.on import On
from placements.annotations.typed import typed
from placements.checker.mode import typecheck
from placements.collectives import all_reduce, convert
from placements.runtime.describe import dtype_name, printed
from placements.runtime.errors import PlacementError
from placements.runtime.ledger import ledger
from placements.runtime.mesh import set_current_mesh
from placements.types.axis import I, P, R, S

MESH = {"dp": 2, "tp": 4}
T, D, H = 6, 8, 16  # local sizes: tokens, model dim, this rank's hidden units

Tokens = Annotated[Float[Tensor, "T D"], On(dp=S(0), tp=I)]
WeightIn = Annotated[Float[Tensor, "H D"], On(tp=S(0))]
WeightOut = Annotated[Float[Tensor, "D H"], On(tp=S(1))]


@typed
def mlp(x_TD: Tokens, w_in_HD: WeightIn, w_out_DH: WeightOut) -> Tokens:
    """Megatron's MLP: the hidden units are cut over tp."""
    note("x_TD", x_TD)
    note("w_in_HD", w_in_HD)
    note("w_out_DH", w_out_DH)
    x_TD = note("convert(x_TD, 'tp', src=I, dst=R)", convert(x_TD, "tp", src=I, dst=R))
    h_TH = note("silu(linear(x_TD, w_in_HD))", silu(linear(x_TD, w_in_HD)))
    y_TD = note("linear(h_TH, w_out_DH)", linear(h_TH, w_out_DH))
    return note(
        "all_reduce(y_TD, 'tp', src=P, dst=I)", all_reduce(y_TD, "tp", src=P, dst=I)
    )


@typed
def mlp_without_convert(x_TD: Tokens, w_in_HD: WeightIn, w_out_DH: WeightOut) -> Tokens:
    """The same, but nobody sums the gradient of x_TD over tp."""
    h_TH = silu(linear(x_TD, w_in_HD))
    y_TD = linear(h_TH, w_out_DH)
    return all_reduce(y_TD, "tp", src=P, dst=I)


_notes: list[tuple[str, str, str]] = []


def note(text: str, x: Tensor) -> Tensor:
    """Write down the type of `x` and of its gradient."""
    known = type_of(x)
    assert known is not None
    shown = printed(tuple(x.shape), dtype_name(x), known)
    _notes.append((text, shown, repr(known.dual())))
    return x


def run(console: Console) -> int:
    """Check both programs; 0 if the right one passes and the wrong one is refused."""
    _notes.clear()
    with set_current_mesh(MESH), typecheck(), ledger() as record:
        x = assert_type(torch.randn(T, D, requires_grad=True), {"dp": S(0), "tp": I})
        w_in = assert_type(torch.randn(H, D), {"dp": R, "tp": S(0)})
        w_out = assert_type(torch.randn(D, H), {"dp": R, "tp": S(1)})
        y = mlp(x, w_in, w_out)
        loss = y.sum()  # over rows that dp cuts: Partial on dp, Invariant on tp
        torch.autograd.backward(loss)
        mesh = ", ".join(f"{axis}={size}" for axis, size in MESH.items())
        title = f"A tensor-parallel MLP on {mesh}, checked in one process"
        table = Table("tensor", "inferred type", "type of its gradient", title=title)
        for row in _notes:
            table.add_row(*row)
        console.print(table)
        sent = ", ".join(
            f"{entry.kind} over {entry.axis}" + " (backward)" * entry.backward
            for entry in record.entries
        )
        console.print(f"Sent: {sent}.\n")
        console.print(
            "The same without the convert. Every forward value is right, but nobody "
            "sums the\ngradient of x_TD over tp. It is refused:\n"
        )
        try:
            mlp_without_convert(x, w_in, w_out)
        except PlacementError as error:
            console.print(str(error), style="red", highlight=False, markup=False)
            return 0
    console.print("the wrong program was accepted", style="bold red")
    return 1
