"""A sample of real models passes; `make test-models` runs all of them in every setting.

The sample has what passes today. A false result fails whatever the model is.
"""

import os
import warnings
from collections.abc import Iterator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")

from tests.models.architectures import ARCHITECTURES
from tests.models.judge import PASSED, Setting, judge

SAMPLE = (
    ("llama", "S train eager"),
    ("gemma3", "V train eager"),
    ("gpt2", "S train sdpa"),
    ("qwen3_moe", "S train eager"),
    ("bert", "S train sdpa"),
    ("bart", "S train eager"),
)


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    """Let transformers warn of itself: it is not under test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize(("name", "setting"), SAMPLE)
def test_a_model_passes_with_true_types(name: str, setting: str) -> None:
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    verdict = judge(architecture, Setting(*setting.split()))
    assert verdict.outcome == PASSED, str(verdict)
    assert verdict.compared > 20


def test_the_table_has_at_least_72_models() -> None:
    assert len({a.name for a in ARCHITECTURES}) == len(ARCHITECTURES) >= 72
