"""Every configuration mistake is refused before anything is built, by field and value."""

import re
from dataclasses import replace
from typing import Any

import pytest

from spmd_moe import MoE, MoEConfig, Parallel
from tests.support.moe import CONFIG, PARALLELS

BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"dim": 0}, "dim (0) must be a whole number of at least 1"),
    ({"hidden_dim": -4}, "hidden_dim (-4) must be a whole number of at least 1"),
    ({"num_experts": 2.0}, "num_experts (2.0) must be a whole number of at least 1"),
    ({"top_k": 0}, "top_k (0) must be a whole number of at least 1"),
    ({"top_k": 5}, "top_k (5) must be at most num_experts (4)"),
    ({"num_shared_experts": -1}, "num_shared_experts (-1) must be at least 0"),
    (
        {"score_function": "relu"},
        "score_function ('relu') must be one of sigmoid, softmax",
    ),
    ({"route_scale": float("nan")}, "route_scale (nan) must be a finite number"),
    ({"load_balance_coeff": 0.0}, "load_balance_coeff (0.0) must be above 0"),
    (
        {"num_limited_groups": 1},
        "num_limited_groups (1) must be unset while num_expert_groups is",
    ),
    (
        {"num_expert_groups": 3, "num_limited_groups": 1},
        "num_experts (4) must be divisible by num_expert_groups (3)",
    ),
    (
        {"num_expert_groups": 4, "num_limited_groups": 2},
        "num_expert_groups (4) must leave at least 2 of the num_experts (4) in each group",
    ),
    (
        {"num_expert_groups": 2},
        "num_limited_groups (None) must be set, from 1 to num_expert_groups (2)",
    ),
    (
        {"num_expert_groups": 2, "num_limited_groups": 3},
        "num_limited_groups (3) must be set, from 1 to num_expert_groups (2)",
    ),
    (
        {"num_expert_groups": 2, "num_limited_groups": 1, "top_k": 3},
        "top_k (3) must be at most the 2 experts of num_limited_groups (1) groups",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS)
def test_bad_config_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(CONFIG, **changes)


BAD_PARALLELS: list[tuple[dict[str, Any], str]] = [
    ({"dp": 0}, "dp (0) must be a whole number of at least 1"),
    ({"tp": True}, "tp (True) must be a whole number of at least 1"),
    ({"tp": 4, "etp": 2}, "etp (2) must be 1 or equal to tp (4)"),
    ({"dp": 2, "tp": 2, "ep": 3}, "ep (3) must divide dp * cp * tp (4)"),
    ({"dp": 2, "tp": 2, "ep": 8}, "ep (8) must divide dp * cp * tp (4)"),
    ({"dp": 2, "tp": 2, "ep": 4, "etp": 2}, "ep (4) must divide dp * cp (2)"),
]


@pytest.mark.parametrize(("degrees", "message"), BAD_PARALLELS)
def test_degrees_that_do_not_multiply_are_refused(
    degrees: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Parallel(**degrees)


@pytest.mark.parametrize(
    ("changes", "parallel", "message"),
    [
        (
            {"num_experts": 6, "top_k": 2},
            Parallel(dp=4, ep=4),
            "num_experts (6) must be divisible by ep (4)",
        ),
        ({}, Parallel(tp=8), "hidden_dim (4) must be divisible by tp (8)"),
        (
            {"hidden_dim": 3},
            Parallel(dp=2, tp=2, ep=2, etp=2),
            "hidden_dim (3) must be divisible by etp (2)",
        ),
        (
            {"hidden_dim": 3},
            Parallel(tp=2, ep=2),
            "num_shared_experts * hidden_dim (3) must be divisible by tp (2)",
        ),
    ],
)
def test_a_layer_that_cannot_be_cut_is_refused(
    changes: dict[str, Any], parallel: Parallel, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        MoE(replace(CONFIG, **changes), parallel)


@pytest.mark.parametrize("parallel", PARALLELS)
def test_both_meshes_have_the_same_number_of_ranks(parallel: Parallel) -> None:
    dense, sparse = parallel.dense_mesh(), parallel.sparse_mesh()
    assert dense["dp"] * dense["cp"] * dense["tp"] == parallel.num_ranks
    assert sparse["edp"] * sparse["ep"] * sparse["etp"] == parallel.num_ranks


def test_records_are_frozen() -> None:
    with pytest.raises(AttributeError):
        CONFIG.dim = 3  # type: ignore[misc]
    with pytest.raises(AttributeError):
        Parallel().dp = 3  # type: ignore[misc]


def test_config_is_by_keyword() -> None:
    with pytest.raises(TypeError):
        MoEConfig(8, 4, 4, 2)  # type: ignore[misc]
