"""The unchanged layer under the checker of `spmd_types`, in every configuration."""

from typing import Any

import pytest
import spmd_types
import torch

from placements import Mesh, assert_type, set_current_mesh
from placements.interop.fake_world import device_mesh_of, fake_world, quiet
from placements.interop.second_engine import SecondEngine, typecheck
from placements.interop.spmd_types import SpmdTypes
from placements.testing import run_ranks
from spmd_moe import MoE, Parallel
from spmd_moe.layouts import CONFIGURATIONS, configuration
from tests.support.moe import (
    CONFIG,
    PARALLELS,
    Case,
    Step,
    assert_equals_one_device,
    on_this_rank,
)

# What its global mode cannot follow: a rank's own rows and their counts, rows that data
# sends to ranks, grouped products, and a Partial that is read by an index. What comes out
# is what the annotations of these functions, and of those that take it, say.
REGIONS: dict[str, str | None] = dict.fromkeys(
    (
        "Router.count",
        "summands",
        "sort_by_expert",
        "fill_slots",
        "AllToAllDispatcher.dispatch",
        "GroupedExperts.forward",
        "AllToAllDispatcher.collect_start",
        "AbstractDispatcher.collect_finish",
        "combine",
    )
)
MODES: dict[str, dict[str, Any]] = {
    "local": {"local": True},
    "global": {"local": False, "regions": REGIONS},
}
BY_NAME = {configuration(p): p for p in PARALLELS if p.num_ranks == 4}


def case_of(name: str, mode: str) -> Case:
    # Its global mode refuses to flatten a cut inner dim, so x is (T, D) there.
    return Case(BY_NAME[name], batch=2 if mode == "local" else 0, seq_len=4)


def steps(cases: list[Case], mode: str) -> list[tuple[Step, set[str]]]:
    found: list[tuple[Step, set[str]]] = []
    for case in cases:
        engine = SecondEngine(**MODES[mode])
        found.append((on_this_rank(case, engine.checking()), engine.said))
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_layer_equals_one_device(name: str, mode: str) -> None:
    case = case_of(name, mode)
    with quiet(), SpmdTypes(local=True).on_threads():
        ranks = run_ranks(case.parallel.dense_mesh(), steps, [case], mode)
    assert_equals_one_device(case, [found[0][0] for found in ranks])
    regions = {what for what in ranks[0][0][1] if what.endswith("is a region")}
    assert bool(regions) == (mode == "global")
    # All that the layer's own annotations have to say to the peer.
    assert {what.split(" is ")[0].split("(")[0] for what in ranks[0][0][1]} <= {
        "LoadBalance.record", "SharedExperts.forward", "GroupedExperts.forward",
        "index_select of a Partial", "to of a Partial", "assert_type", *REGIONS,
    }  # fmt: skip


@pytest.mark.parametrize("region", REGIONS)
def test_every_region_is_needed(region: str) -> None:
    name = "C1" if region.startswith("AllToAll") else "C3"
    case = case_of(name, "global")
    fewer = {key: value for key, value in REGIONS.items() if key != region}
    parallel = Parallel(dp=2, tp=2, ep=case.parallel.ep, sequence_parallel=True)
    with fake_world(), pytest.raises(SpmdTypes.refusals):
        on_meta(parallel, typecheck(local=False, regions=fewer))


def on_meta(parallel: Parallel, block: Any) -> None:
    dense, sparse = (
        device_mesh_of(Mesh(sizes))
        for sizes in (parallel.dense_mesh(), parallel.sparse_mesh())
    )
    with set_current_mesh(dense):
        moe = MoE(CONFIG, parallel, sparse_mesh=sparse, device="meta")
        cut = parallel.cp * (parallel.tp if parallel.sequence_parallel else 1)
        x = torch.empty(8 // cut, CONFIG.dim, device="meta", requires_grad=True)
        with block:
            assert_type(x, moe.input_types(8))
            moe(x, seq_len=8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_types_alone_on_groups_that_send_nothing(name: str, mode: str) -> None:
    with fake_world():
        on_meta(BY_NAME[name], typecheck(**MODES[mode]))


def test_on_processes() -> None:
    cases = [case_of(name, "local") for name in ("C1", "C5")]
    ranks = run_ranks(4, steps, cases, "local", backend="gloo")
    for k, case in enumerate(cases):
        assert_equals_one_device(case, [found[k][0] for found in ranks])


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_that_forgets_a_sum_is_refused(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spmd_moe import layer

    def forgetful(x: Any, src: Any, dst: Any, rows: Any) -> Any:
        return x if src is dst or src["tp"].letter == "P" else moved(x, src, dst, rows)

    moved = layer._move
    monkeypatch.setattr(layer, "_move", forgetful)
    with fake_world(), pytest.raises(spmd_types.SpmdTypeError):
        on_meta(BY_NAME["C4"], typecheck(**MODES[mode]))
