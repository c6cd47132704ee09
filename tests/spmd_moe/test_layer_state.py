"""What derives from the parameters' types: saving, clipping, copies, verified values."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from placements import (
    assert_type,
    clip_grad_norm_,
    global_state_dict,
    gradient_axes,
    load_global_state_dict,
    reduce_gradients,
    set_current_mesh,
    split,
    type_of,
    typecheck,
    verify,
)
from placements.testing import run_ranks
from spmd_moe import MoE, Parallel
from tests.spmd_moe.test_layouts import BY_NAME
from tests.support.moe import Case, build, meshes, on_one_device


def saved(case: Case) -> dict[str, Tensor]:
    with meshes(case.parallel) as (dense, sparse):
        return global_state_dict(build(case, sparse), meshes=(dense, sparse))


def loaded(case: Case, state: dict[str, Tensor]) -> dict[str, Tensor]:
    with meshes(case.parallel) as (dense, sparse):
        moe = build(replace(case, seed=99), sparse)
        load_global_state_dict(moe, state, meshes=(dense, sparse))
        return global_state_dict(moe, meshes=(dense, sparse))


@pytest.mark.parametrize("name", BY_NAME)
def test_saved_on_one_mesh_and_loaded_on_another(name: str) -> None:
    case = Case(BY_NAME[name], favoured=(1,))
    mesh = case.parallel.dense_mesh()
    one = build(replace(case, parallel=Parallel())).state_dict()
    for state in (*run_ranks(mesh, saved, case), *run_ranks(mesh, loaded, case, one)):
        assert state.keys() == one.keys()
        for key, value in one.items():
            assert torch.equal(state[key], value), key


def norm(case: Case) -> float:
    with meshes(case.parallel) as (dense, sparse):
        moe = build(case, sparse)
        x, weights = (
            split(t, moe.layout.input, dense)[dist.get_rank()] for t in case.tensors()
        )
        (moe(x, seq_len=case.seq_len) * weights).sum().backward()
        reduce_gradients(moe, meshes=(dense, sparse))
        return float(clip_grad_norm_(moe, 1.0, meshes=(dense, sparse)))


@pytest.mark.parametrize("name", BY_NAME)
def test_the_gradient_norm_is_that_of_one_device(name: str) -> None:
    case = Case(BY_NAME[name])
    gradients = on_one_device(case).gradients.values()
    wanted = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    for found in run_ranks(case.parallel.dense_mesh(), norm, case):
        assert found == pytest.approx(wanted, rel=1e-10)


def verified(case: Case) -> None:
    with meshes(case.parallel) as (dense, sparse):
        moe = build(case, sparse)
        x = split(case.tensors()[0], moe.layout.input, dense)[dist.get_rank()]
        with verify():
            assert_type(x.requires_grad_(), moe.input_types(case.seq_len))
            moe(x, seq_len=case.seq_len).sum().backward()


@pytest.mark.parametrize("name", BY_NAME)
def test_values_are_what_their_types_say(name: str) -> None:
    case = Case(BY_NAME[name])
    run_ranks(case.parallel.dense_mesh(), verified, case)


@pytest.mark.parametrize("name", BY_NAME)
def test_gradients_are_due_on_the_axes_where_parameters_are_replicated(name: str) -> None:
    parallel = Parallel(**{**vars(BY_NAME[name]), "cp": 2})
    with set_current_mesh(parallel.dense_mesh()):
        moe = MoE(Case(parallel).config, parallel)
        meshes = (parallel.dense_mesh(), parallel.sparse_mesh())
        axes = gradient_axes(moe, meshes=meshes)
    assert axes["router.w_gate_ED"] == ("dp", "cp", "tp")
    assert axes["shared_experts.w2_DH"] == ("dp", "cp")
    expected = ("dp", "cp") if parallel.ep == 1 else ("edp",)
    assert axes["experts.w1_GFD"] == expected


def test_types_survive_deepcopy_and_half() -> None:
    parallel = BY_NAME["C1"]
    with set_current_mesh(parallel.dense_mesh()):
        moe = copy.deepcopy(MoE(Case(parallel).config, parallel)).to(torch.bfloat16)
        x = torch.randn(2, 2, 8, dtype=torch.bfloat16)
        with typecheck():
            assert_type(x, moe.input_types(4))
            y = moe(x, seq_len=4)
            assert type_of(y) == type_of(x)
