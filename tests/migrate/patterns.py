"""The patterns of the migration guide, as they lie in examples/migrate.

A pattern is a folder with five files: `one_device.py` says what is computed, on which mesh,
and what each rank holds of every input and result; `before.py`, `after_placements.py` and
`after_spmd_types.py` have a `program` each, which takes what this rank holds of the inputs
and returns what it holds of the results; `wrong.py` has the bug three times, in those words.
`UNCHECKED` in `one_device.py` names the checkers that refuse even the right version.
"""

import ast
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "migrate"
BEFORE, OURS, PEER = "before", "after_placements", "after_spmd_types"
VERSIONS = (BEFORE, OURS, PEER)
FILES = ("one_device", *VERSIONS, "wrong")

# In the order of the guide's first page.
NAMES = (
    "local_tensors",
    "replicated_weights",
    "column_row_parallel",
    "vocabulary_parallel",
    "sequence_parallel_norms",
    "local_map",
    "scatter",
    "token_indices",
    "uneven_sequences",
    "dispatch_combine",
    "expert_tensor_parallel",
    "counts_and_bias",
    "loss_averaging",
    "gradient_clipping",
    "fsdp2_with_ep",
    "checkpoints",
)


@dataclass(frozen=True)
class Pattern:
    """One folder: the modules by name, and their texts."""

    name: str
    modules: dict[str, ModuleType]
    texts: dict[str, str]

    @property
    def of_one_device(self) -> Any:
        return self.modules["one_device"]

    @property
    def unchecked(self) -> dict[str, str]:
        """Return the checkers that refuse even the right version, and why."""
        return getattr(self.of_one_device, "UNCHECKED", {})

    def program(self, version: str) -> Callable[..., Any]:
        return self.modules[version].program

    def imported_otherwise(self) -> Callable[..., Any]:
        """Return the program for spmd_types with no change but of its import."""
        before, after = "import spmd_types as spmd", "from placements.interop import spmd"
        text = self.texts[PEER]
        assert text.count("spmd_types as") == 1 and before in text
        scope: dict[str, Any] = {"__name__": f"{self.modules[PEER].__name__}_imported"}
        exec(compile(text.replace(before, after), f"{self.name}/{PEER}.py", "exec"), scope)
        return scope["program"]

    def wrong(self, version: str) -> Callable[..., Any] | None:
        """Return the bug in the words of a version; None if they cannot say it."""
        return getattr(self.modules["wrong"], version, None)

    def docstring(self, file: str) -> str:
        said = ast.get_docstring(ast.parse(self.texts[file]))
        assert said, f"{self.name}/{file}.py has no docstring"
        return said

    def code(self, file: str) -> str:
        """Return a file without its docstring, as the page shows it."""
        first = ast.parse(self.texts[file]).body[0]
        assert first.end_lineno is not None
        return "\n".join(self.texts[file].splitlines()[first.end_lineno :]).strip()


@cache
def pattern(name: str) -> Pattern:
    """Load a pattern; a file may import from another of the same folder."""
    modules = {f: importlib.import_module(f"examples.migrate.{name}.{f}") for f in FILES}
    texts = {file: (FOLDER / name / f"{file}.py").read_text() for file in FILES}
    return Pattern(name, modules, texts)
