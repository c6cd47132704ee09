"""The layer does not bring the training with it, nor the training the command."""

import subprocess
import sys
from pathlib import Path

import spmd_moe.training

PROBE = """
import sys
import spmd_moe
heavy = ("spmd_moe.training", "spmd_moe.cli", "torch.distributed.checkpoint", "rich", "matplotlib")
print([name for name in sys.modules if name.startswith(heavy)])
"""


def test_importing_the_layer_imports_no_training() -> None:
    out = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "[]"


def test_training_knows_nothing_of_the_command() -> None:
    for file in Path(spmd_moe.training.__path__[0]).glob("*.py"):
        assert "spmd_moe.cli" not in file.read_text(), file.name
