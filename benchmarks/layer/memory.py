"""The most memory that a call held at one time beyond what was held before, by torch's
own record of what it allocates. What a library below takes without asking torch is not in
it."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

# Above the level at which the profiler prints a line for each start and stop. It is read
# when the first profile starts.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def peak_bytes(call: Callable[[], object]) -> int:
    """Bytes at the peak of a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events: list[Any] = json.loads(path.read_text())["traceEvents"]
    changes = [e for e in events if e.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak
