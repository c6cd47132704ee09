"""What importing imports, and how long it takes over torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "placements"

# In processor time, since tests run side by side, and without the collection of torch's own
# garbage, which falls into this import or the next one by chance.
PROBE = """
import gc, time, sys
import torch, torch.distributed
gc.disable()
start = time.process_time()
import placements
spent = time.process_time() - start
heavy = [m for m in sys.modules if m.startswith(("spmd_types", "torch.distributed.tensor", "spmd_moe", "hypothesis", "pytest", "beartype"))]
print(spent, heavy)
"""


def test_importing_is_light_and_quick() -> None:
    spent: list[float] = []
    for _ in range(3):
        out = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True
        ).stdout
        seconds, _, heavy = out.partition(" ")
        assert heavy.strip() == "[]"
        spent.append(float(seconds))
    assert min(spent) <= 0.25


def imports_of(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda f: f.name)
def test_placements_never_imports_spmd_moe(file: Path) -> None:
    assert not any(name.startswith("spmd_moe") for name in imports_of(file))


@pytest.mark.parametrize("file", sorted((PACKAGE / "inference").rglob("*.py")), ids=str)
def test_inference_is_pure(file: Path) -> None:
    allowed = ("placements.types", "placements.inference")
    ours = {name for name in imports_of(file) if name.startswith("placements.")}
    assert all(name.startswith(allowed) for name in ours)
    assert "torch" not in imports_of(file)


def test_one_file_touches_the_attribute_on_tensors() -> None:
    users = [f.name for f in PACKAGE.rglob("*.py") if "_placements_type" in f.read_text()]
    assert users == ["tags.py"]
