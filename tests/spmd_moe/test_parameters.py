"""State that is made again is what construction made: weights, bias and counts."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from placements import assert_type, set_current_mesh, type_of, typecheck
from placements._torch import unseen
from placements.testing import device_mesh, run_ranks
from spmd_moe import MoE, MoEConfig, Parallel
from spmd_moe.balance import LoadBalance
from spmd_moe.training.language_model import LanguageModel
from spmd_moe.training.recipe import Recipe
from tests.spmd_moe.test_layouts import BY_NAME
from tests.support.moe import CONFIG, meshes

BALANCED = replace(CONFIG, load_balance_coeff=1e-3)


def held(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter, every buffer and the counts, which are no buffer."""
    found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for path, m in module.named_modules():
        if isinstance(m, LoadBalance):
            found[f"{path}.counts_E".lstrip(".")] = m.counts_E
    return found


def state(module: nn.Module) -> dict[str, Tensor]:
    """All of its values."""
    with unseen():
        return {name: tensor.detach().clone() for name, tensor in held(module).items()}


def spoil(module: nn.Module) -> None:
    """What `to_empty` may find in memory."""
    with torch.no_grad(), unseen():
        for tensor in held(module).values():
            tensor.fill_(77)


def assert_same_state(found: nn.Module, wanted: nn.Module | dict[str, Tensor]) -> None:
    expected = wanted if isinstance(wanted, dict) else state(wanted)
    values = state(found)
    assert list(values) == list(expected)
    for name, value in expected.items():
        assert values[name].dtype == value.dtype, name
        assert values[name].device == value.device, name
        with unseen():
            assert torch.equal(values[name], value), name


def alone(module: Any) -> None:
    module.reset_parameters()


def one_by_one(module: nn.Module) -> None:
    """As trainers write it."""
    for m in module.modules():
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()  # type: ignore[operator]


def backwards(module: nn.Module) -> None:
    for m in reversed([*module.modules()]):
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()  # type: ignore[operator]


RESETS: list[Callable[[Any], None]] = [alone, one_by_one, backwards]


def with_context(config: MoEConfig, seed: int) -> MoE:
    with torch.device("meta"):
        return MoE(config, seed=seed)


def with_argument(config: MoEConfig, seed: int) -> MoE:
    return MoE(config, seed=seed, device="meta")


def with_a_default(config: MoEConfig, seed: int) -> MoE:
    torch.set_default_device("meta")
    try:
        return MoE(config, seed=seed)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("make", [with_context, with_argument, with_a_default])
def test_a_layer_from_the_meta_device_is_the_layer_made_at_once(
    make: Callable[[MoEConfig, int], MoE], reset: Callable[[Any], None], checked: bool
) -> None:
    with set_current_mesh({}), typecheck() if checked else nullcontext():
        moe = make(BALANCED, 5)
        assert all(t.is_meta for t in state(moe).values())
        reset(moe)  # nothing to fill yet
        assert moe.to_empty(device="cpu") is moe
        spoil(moe)
        reset(moe)
        assert_same_state(moe, MoE(BALANCED, seed=5))
        x = torch.randn(3, 8)
        assert torch.equal(moe(x, seq_len=3), MoE(BALANCED, seed=5)(x, seq_len=3))


@pytest.mark.parametrize("path", ["router", "router.balance", "experts", "shared_experts"])
def test_every_module_with_state_can_be_reset_by_itself(path: str) -> None:
    moe, made = MoE(BALANCED, seed=4), MoE(BALANCED, seed=4)
    spoil(moe)
    module: Any = moe.get_submodule(path)
    module.reset_parameters()
    assert_same_state(module, made.get_submodule(path))
    others = {n for n, v in state(moe).items() if (v == 77).all()}
    assert others == {n for n in state(moe) if not n.startswith(f"{path}.")}


def test_training_is_forgotten() -> None:
    torch.manual_seed(0)  # tokens that do not happen to go to all experts alike
    moe, made = MoE(BALANCED, seed=4), MoE(BALANCED, seed=4)
    made_balance = state(made.router.balance)
    made_bias, made_counts = (made_balance[name] for name in ("expert_bias_E", "counts_E"))
    moe(torch.randn(6, 8), seq_len=6).sum().backward()
    moe.router.balance.update()
    moe(torch.randn(6, 8), seq_len=6)
    assert not torch.equal(moe.router.balance.expert_bias_E, made_bias)
    assert not torch.equal(moe.router.balance.counts_E, made_counts)
    moe.reset_parameters()
    assert_same_state(moe, made)


def test_a_copy_remembers_its_seed_and_a_new_class_its_name() -> None:
    """FSDP2 and parametrizations give a module a class of another name."""
    moe = copy.deepcopy(MoE(BALANCED, seed=4))
    for module in moe.modules():
        module.__class__ = type(f"FSDP{type(module).__name__}", (type(module),), {})
    spoil(moe)
    moe.reset_parameters()
    assert_same_state(moe, MoE(BALANCED, seed=4))


def test_a_foreign_module_below_is_reset_too() -> None:
    moe: Any = MoE(BALANCED)
    moe.shared_experts = nn.Sequential(nn.Linear(8, 8))
    spoil(moe)
    moe.reset_parameters()
    assert not (moe.shared_experts[0].weight == 77).any()


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def by_default(dtype: torch.dtype) -> MoE:
    torch.set_default_dtype(dtype)
    try:
        return MoE(BALANCED, seed=2)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype_rounds_the_weights_of_float32(dtype: torch.dtype) -> None:
    made = MoE(BALANCED, seed=2, dtype=dtype, device="cpu")
    wide = MoE(BALANCED, seed=2)
    expected = {
        name: value.to(dtype) if name in dict(wide.named_parameters()) else value
        for name, value in state(wide).items()
    }
    assert made.router.balance.expert_bias_E.dtype == torch.float32
    assert made.router.balance.counts_E.dtype == torch.int64
    assert_same_state(made, expected)
    assert_same_state(by_default(dtype), expected)
    late = MoE(BALANCED, seed=2, dtype=dtype, device="meta").to_empty(device="cpu")
    spoil(late)
    late.reset_parameters()
    assert_same_state(late, expected)
    made(torch.randn(3, 8, dtype=dtype), seq_len=3)


def test_a_dtype_that_is_none_of_numbers_with_fractions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype \(torch.int64\) must be"):
        MoE(CONFIG, dtype=torch.int64)


def test_a_dtype_by_its_name_is_refused() -> None:
    with pytest.raises(TypeError, match=r"dtype \('bfloat16'\) must be a torch\.dtype"):
        MoE(CONFIG, dtype=cast(Any, "bfloat16"))


def test_construction_and_reset_leave_the_random_state_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    MoE(BALANCED).reset_parameters()
    assert torch.equal(torch.get_rng_state(), before)


def test_torch_can_skip_the_initialisation() -> None:
    moe = nn.utils.skip_init(MoE, BALANCED, seed=5)
    moe.reset_parameters()
    assert_same_state(moe, MoE(BALANCED, seed=5))


# --- On ranks -----------------------------------------------------------------------------


def late_and_at_once(parallel: Parallel, shared: bool) -> None:
    with meshes(parallel) as (_, sparse), typecheck():
        given = sparse if shared else None
        made = MoE(BALANCED, parallel, sparse_mesh=given, seed=6)
        with torch.device("meta"):
            late = MoE(BALANCED, parallel, sparse_mesh=given, seed=6)
        late.to_empty(device="cpu")
        spoil(late)
        late.reset_parameters()
        assert_same_state(late, made)
        types = late.input_types(5)
        length = 5
        for t in (types["cp"], types["tp"]):
            extent = getattr(t, "extent", None)
            if extent is not None:
                place = dist.get_rank() % 2  # tp is the innermost axis
                length = extent.local_size(place)
        x = assert_type(torch.randn(2, length, 8), types)
        y = late(x, seq_len=5)
        assert type_of(y) == type_of(x)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", BY_NAME)
def test_shards_from_the_meta_device_are_those_made_at_once(
    name: str, shared: bool
) -> None:
    """Inside `typecheck()`; that shards are those of one device is tested in test_layer."""
    parallel = BY_NAME[name]
    run_ranks(parallel.dense_mesh(), late_and_at_once, parallel, shared)


RECIPE = Recipe(dim=8, hidden_dim=8, num_experts=4, heads=2, seq_len=7, batch=4)


def model_late_and_at_once(parallel: Parallel) -> None:
    with meshes(parallel) as (_, sparse), typecheck():
        made = LanguageModel(RECIPE, parallel, sparse)
        for reset in RESETS:
            with torch.device("meta"):
                late = LanguageModel(RECIPE, parallel, sparse)
            late.to_empty(device="cpu")
            spoil(late)
            reset(late)
            assert_same_state(late, made)


@pytest.mark.parametrize("name", ["C1", "C4"])
def test_a_language_model_from_the_meta_device_is_the_one_made_at_once(name: str) -> None:
    parallel = BY_NAME[name]
    run_ranks(parallel.dense_mesh(), model_late_and_at_once, parallel)


PLACEMENTS: list[tuple[Any, ...]] = [
    (Shard(0), Replicate()),
    (Shard(0), Shard(0)),
    (Shard(1), Shard(0)),
    (Replicate(), Shard(-1)),
]


def filled_shards(placements: tuple[Any, ...], late: bool) -> list[tuple[str, Tensor]]:
    """A layer whose parameters are distributed by other means, as FSDP2 does."""
    mesh = device_mesh()
    moe = MoE(BALANCED, seed=6, device="meta" if late else "cpu")
    for module in moe.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            given = distribute_tensor(parameter.detach(), mesh, placements)
            module.register_parameter(name, nn.Parameter(given))
    if late:
        moe.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in moe.parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().fill_(77)
    moe.reset_parameters()
    found: list[tuple[str, Tensor]] = []
    for name, parameter in moe.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.placements
        found.append((name, parameter.detach().full_tensor()))
    return found


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_shards_of_dtensors_are_filled_with_their_own_rows(
    placements: tuple[Any, ...], late: bool
) -> None:
    """Three ranks on an axis cut 4 and 8 rows unevenly, as FSDP2 does, and leave none."""
    made = dict(MoE(BALANCED, seed=6).named_parameters())
    for found in run_ranks({"dp": 3, "tp": 2}, filled_shards, placements, late):
        assert [name for name, _ in found] == list(made)
        for name, value in found:
            assert torch.equal(value, made[name]), name


def partial_parameter() -> str:
    moe = MoE(BALANCED)
    mesh = device_mesh()
    given = DTensor.from_local(torch.zeros(4, 8), mesh, [Partial()])
    moe.router.register_parameter("w_gate_ED", nn.Parameter(given))
    with pytest.raises(TypeError) as caught:
        moe.reset_parameters()
    return str(caught.value)


def test_a_dtensor_that_is_no_shard_is_refused() -> None:
    for text in run_ranks({"dp": 2}, partial_parameter):
        assert "expected Shard and Replicate only" in text


def sharded_by_fsdp() -> list[tuple[str, Tensor]]:
    moe = MoE(BALANCED, seed=6, device="meta")
    fully_shard(moe.experts, mesh=device_mesh())
    fully_shard(moe, mesh=device_mesh())
    moe.to_empty(device="cpu")
    moe.reset_parameters()
    assert moe.router.balance.counts_E.tolist() == [0] * 4
    assert moe.router.balance.expert_bias_E.tolist() == [0.0] * 4
    return [(n, cast(DTensor, p.detach()).full_tensor()) for n, p in moe.named_parameters()]


def test_a_layer_that_fsdp_sharded_on_the_meta_device_is_the_one_made_at_once() -> None:
    """Modules have another class then, and four rows are cut over three ranks."""
    made = dict(MoE(BALANCED, seed=6).named_parameters())
    for found in run_ranks({"dp": 3}, sharded_by_fsdp):
        assert [name for name, _ in found] == list(made)
        for name, value in found:
            assert torch.equal(value, made[name]), name
