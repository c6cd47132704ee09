"""The layer does not bring the training with it."""

import subprocess
import sys

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
