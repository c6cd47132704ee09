"""`spmd-moe --version`, and where the version comes from."""

from pathlib import Path

import pytest
import torch

import placements
import spmd_moe
from spmd_moe.cli.main import main


def test_the_version_is_that_of_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"spmd-moe {placements.__version__} (torch {torch.__version__}")
    assert spmd_moe.__version__ == placements.__version__
    pyproject = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert 'version = { attr = "placements.version.__version__" }' in pyproject
