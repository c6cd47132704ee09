"""`reinterpret` forgets that rows are pieces of a whole, since they are about to be sorted
by data: they are Varying until they are back in the order of the tokens, which the last
two lines claim. No type can check that claim: compare with one device. `reinterpret_mesh`
sees the ranks as the sparse mesh, and checks that both presentations say the same. Every
collective has its backward. `device_mesh` is for tests; a trainer makes both meshes with
`init_device_mesh`. Weights that belong to a module are shown in the guide's first page."""

from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor

from examples.migrate.dispatch_combine.one_device import EXPERTS, SPARSE
from placements import (
    On,
    S,
    V,
    all_to_all,
    current_mesh,
    reinterpret,
    reinterpret_mesh,
    set_current_mesh,
    typed,
)
from placements.testing import device_mesh

CUT = On(dp=S(0), tp=S(0))


def own(x: Tensor) -> Tensor:
    return reinterpret(reinterpret(x, "dp", src=S(0), dst=V), "tp", src=S(0), dst=V)


def send(x: Tensor, sent: list[int], received: list[int]) -> Tensor:
    return all_to_all(
        x, "ep", src=V, dst=V, input_split_sizes=sent, output_split_sizes=received
    )


def splits(ids: Tensor) -> tuple[list[int], list[int]]:
    counts = torch.bincount(ids, minlength=EXPERTS)
    arriving = all_to_all(counts, "ep", src=V, dst=V)
    return counts.tolist(), arriving.tolist()


@typed
def program(
    x: Annotated[Float[Tensor, "T D"], CUT],
    gates: Annotated[Float[Tensor, " T"], CUT],
    ids: Annotated[Int[Tensor, " T"], CUT],
    w: Annotated[Float[Tensor, "E D D"], CUT],
) -> Annotated[Float[Tensor, "T D"], CUT]:
    dense, sparse = current_mesh(), device_mesh(SPARSE)
    assert dense is not None
    x, gates, ids, w = (reinterpret_mesh(own(held), sparse) for held in (x, gates, ids, w))
    with set_current_mesh(sparse):
        sent, received = splits(ids)
        order = ids.argsort(stable=True)
        rows = send(x[order], sent, received)
        weights = send(gates[order], sent, received)
        computed = (rows @ w[0]) * weights.unsqueeze(1)
        back = send(computed, received, sent)[order.argsort()]
    y = reinterpret(reinterpret_mesh(back, dense), "tp", src=V, dst=S(0))
    return reinterpret(y, "dp", src=V, dst=S(0))
