"""The backward of the layer is the adjoint of its forward, for its input and every weight.

Unlike the comparison with the reference this needs none, so it would also find a reduction
that the layer and its reference lacked alike.
"""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functional_call

from placements import I, Mesh, P, convert, set_current_mesh, split
from placements.testing import check_adjoint
from placements.types.axis import AxisType
from spmd_moe import MoE, Parallel
from tests.spmd_moe.test_layer import named
from tests.support.moe import PARALLELS, Case, build, declared_types, meshes

Types = dict[str, AxisType]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The tensors are tiny, and the ranks are threads already."""
    torch.set_num_threads(1)


def loss_of(moe: MoE, x: Tensor, weights: Mapping[str, Tensor], case: Case) -> Tensor:
    """This rank's summand of sum(y * loss_weights)."""
    dense = Mesh(case.parallel.dense_mesh())
    loss_weights = split(case.tensors()[1], moe.layout.input, dense)[dist.get_rank()]
    y = functional_call(moe, dict(weights), (x,), {"seq_len": case.seq_len})
    loss = (y * loss_weights).sum()
    if moe.layout.input["tp"] == I:  # every rank of tp has the whole of it
        loss = convert(loss, "tp", I, P)
    return loss


def check_loss(case: Case, types: Mapping[str, Types], mesh: Mapping[str, int]) -> None:
    """The gradient of the loss, by inputs with these types on this mesh."""

    def loss(*values: Tensor) -> Tensor:
        given = dict(zip(types, values, strict=True))
        with meshes(case.parallel) as (dense, sparse):
            moe = build(case, sparse)
            x = given.pop("x", None)
            if x is None:
                x = split(case.tensors()[0], moe.layout.input, dense)[dist.get_rank()]
            return loss_of(moe, x, given, case)

    values = build(replace(case, parallel=Parallel())).state_dict()
    values["x"] = case.tensors()[0]
    inputs = {name: (values[name], placed) for name, placed in types.items()}
    check_adjoint(loss, inputs, dict.fromkeys(mesh, P), mesh=mesh)


@pytest.mark.parametrize(
    "parallel", [p for p in PARALLELS if p.num_ranks in (2, 4)], ids=named
)
def test_backward_is_the_adjoint(parallel: Parallel) -> None:
    case = Case(parallel)
    with set_current_mesh(Mesh(parallel.dense_mesh())):
        moe = build(case, Mesh(parallel.sparse_mesh()))
    types = {name: placed for name, placed in declared_types(moe) if ".w" in name}
    assert types.keys() == dict(moe.named_parameters()).keys()
    dense = {name: placed for name, placed in types.items() if "tp" in placed}
    sparse = {name: placed for name, placed in types.items() if "etp" in placed}
    assert dense.keys() | sparse.keys() == types.keys()
    check_loss(case, {"x": dict(moe.layout.input), **dense}, parallel.dense_mesh())
    if sparse:
        check_loss(case, sparse, parallel.sparse_mesh())
