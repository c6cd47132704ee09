"""Every cell of docs/trainer_features.md is what it says; the same on real processes."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from placements.testing import run_ranks
from spmd_moe import MoE
from tests.trainer.features import COLUMNS, FEATURES, Feature
from tests.trainer.judge import cell, judged, message_of, on_one_device
from tests.trainer.loop import Options, Setting, Trained, train
from tests.trainer.page import kind, read

# What torch says of itself: that one process saves alone, and of what it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "trainer_features.md"
STEPS = sorted((ROOT / "examples" / "trainer").glob("step*.py"))
GLOO = "4 ranks"


def test_the_page_has_every_feature_and_column() -> None:
    cells = read(PAGE.read_text())
    assert list(cells) == [feature.name for feature in FEATURES], "run: make trainer-page"
    assert all(list(row) == list(COLUMNS) for row in cells.values())
    assert not [row for row in cells.values() if "DIFFERENT" in str(row)]


# Every cell in a deep run, and each time one of every row, along the diagonals.
CELLS = [
    pytest.param(
        feature,
        column,
        marks=() if (row + at) % len(COLUMNS) == 0 else pytest.mark.deep,
        id=f"{feature}-{column}",
    )
    for row, feature in enumerate(FEATURES)
    for at, column in enumerate(COLUMNS)
]


@pytest.mark.parametrize("feature, column", CELLS)
def test_a_cell_is_what_the_page_says(feature: Feature, column: str) -> None:
    said = read(PAGE.read_text())[feature.name][column]
    found = cell(feature, COLUMNS[column])
    assert found.is_right, f"{found}; allowed {found.allowed:.0e}"
    assert kind(str(found)) == kind(said)


def several(setting: Setting, features: list[Options]) -> list[Trained | str]:
    """Every training on this rank; what is refused, is refused on all ranks alike."""
    found: list[Trained | str] = []
    for options in features:
        try:
            found.append(train(setting, options))
        except (RuntimeError, TypeError, ValueError) as error:
            found.append(f"refused: {message_of(error)}")
    return found


def test_every_feature_on_real_processes(tmp_path: Path) -> None:
    setting, said = COLUMNS[GLOO], read(PAGE.read_text())
    options = [
        replace(feature.options, directory=str(tmp_path / str(k)))
        for k, feature in enumerate(FEATURES)
    ]
    ranks = run_ranks(
        setting.parallel.dense_mesh(),
        several,
        setting,
        options,
        backend="gloo",
        timeout=600.0,
    )
    for k, feature in enumerate(FEATURES):
        of_ranks = [rank[k] for rank in ranks]
        trained = [one for one in of_ranks if isinstance(one, Trained)]
        found = str(judged(feature, trained)) if trained else str(of_ranks[0])
        assert len(trained) in (0, len(ranks)), of_ranks
        assert kind(found) == kind(said[feature.name][GLOO]), feature.name


def test_what_is_frozen_stays_and_the_rest_moves() -> None:
    """So that rows of frozen parts do not compare nothing with nothing."""
    before = on_one_device(Options(steps=0, checking="never")).state
    for frozen in ("router.w_gate", "moe.experts"):
        after = on_one_device(Options(frozen=frozen, checking="never")).state
        moved = {name for name in before if not before[name].equal(after[name])}
        assert moved == {name for name in before if frozen not in name}


def test_a_wrong_training_is_found() -> None:
    """A gradient that is off by a thousandth, and a batch that lacks a sequence."""
    feature = FEATURES[0]
    right = on_one_device(feature.plain)
    assert judged(feature, [right]).is_right
    state = {name: value * 1.001 for name, value in right.state.items()}
    assert not judged(feature, [replace(right, state=state)]).is_right
    gradients = {name: value * 1.001 for name, value in right.gradients.items()}
    assert not judged(feature, [right, replace(right, gradients=gradients)]).is_right


def test_checkpointing_computes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that rows of checkpointing do not compare the plain loop with itself."""
    forwards: list[int] = []
    original = MoE.forward
    monkeypatch.setattr(
        MoE, "forward", lambda *a, **k: (forwards.append(1), original(*a, **k))[1]
    )
    counts: dict[str, int] = {}
    for kind_of in ("", "reentrant", "not reentrant", "selective"):
        forwards.clear()
        train(Setting(), Options(checkpointing=kind_of, steps=1, checking="never"))
        counts[kind_of] = len(forwards)
    assert counts == {"": 2, "reentrant": 4, "not reentrant": 4, "selective": 4}


@pytest.mark.parametrize("step", STEPS, ids=lambda file: file.stem)
def test_the_steps_of_the_page_run_and_are_named_there(step: Path) -> None:
    """Each of them compares itself with one device."""
    assert f"`examples/trainer/{step.name}`" in (ROOT / "docs/your_trainer.md").read_text()
    assert len(step.read_text().splitlines()) < 80
    result = subprocess.run([sys.executable, str(step)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout
