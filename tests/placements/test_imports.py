"""What importing imports, and how long it takes over torch."""

import subprocess
import sys

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
