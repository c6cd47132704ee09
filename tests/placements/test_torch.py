"""What is used of torch beyond its public API stands in one folder, and each use has a probe."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from placements import _torch

ROOT = Path(__file__).parents[2]
INSIDE = ROOT / "placements" / "_torch"
# Programs as users of the peers write them, in the words of torch.
AS_PUBLISHED = ROOT / "spmd_moe" / "bugs" / "peers" / "programs"
# Of Python and of named tuples, not of torch.
NOT_TORCH = {"_replace", "_asdict", "_fields", "_getframe", "_current_frames", "_exit"}

# Names of torch that this project might use for something of its own as well.
OF_TORCH = {"_base", "_cdata", "_buffers", "_parameters", "_modules", "_pg_registry", "_C"}
OF_METHODS = {"_load_from_state_dict", "_named_members"}


def files() -> list[Path]:
    every = [*(ROOT / "placements").rglob("*.py"), *(ROOT / "spmd_moe").rglob("*.py")]
    return [f for f in every if not {INSIDE, AS_PUBLISHED} & {*f.parents}]


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def names_made(tree: ast.AST) -> Iterator[str]:
    """Private names that this project itself defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def uses(tree: ast.AST, own: set[str]) -> list[str]:
    found: list[str] = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "torch"
        ):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [f"line {node.lineno}: import {n}" for n in names if is_private(n)]
        elif isinstance(node, ast.Import):
            paths = [a.name for a in node.names if a.name.split(".")[0] == "torch"]
            found += [f"line {node.lineno}: import {p}" for p in paths if "._" in p]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr in OF_TORCH or node.attr not in own | NOT_TORCH:
                found.append(f"line {node.lineno}: .{node.attr}")
        elif isinstance(node, ast.FunctionDef) and node.name in OF_METHODS:
            found.append(f"line {node.lineno}: def {node.name}")
        elif isinstance(node, ast.Constant) and node.value in OF_TORCH | OF_METHODS:
            found.append(f"line {node.lineno}: {node.value!r}")
    return found


def test_nothing_else_touches_the_inside_of_torch() -> None:
    trees = {f: ast.parse(f.read_text()) for f in files()}
    own = {name for tree in trees.values() for name in names_made(tree) if is_private(name)}
    found = {str(f.relative_to(ROOT)): uses(tree, own) for f, tree in trees.items()}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize("line", [
    "import torch.utils._pytree", "from torch._C import DisableTorchFunction",
    "from torch.distributed import _functional_collectives", "x._version",
    "torch._C._current_graph_task_id()", "dist.distributed_c10d._world",
    "module._buffers", "vars(module)['_buffers']", "def _load_from_state_dict(self): ...",
])  # fmt: skip
def test_a_planted_use_is_found(line: str) -> None:
    assert uses(ast.parse(line), set())
    assert not uses(ast.parse("import torch\nself._own = torch.ones(1)"), {"_own"})


@pytest.mark.parametrize("part", _torch.PARTS)
def test_every_probe_passes_here(part: str) -> None:
    _torch.require(part)


def test_the_tested_versions_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "versions.md").read_text()
    readme = (ROOT / "README.md").read_text()
    for version in _torch.TESTED:
        assert f"| {version} |" in page
    first, last = _torch.TESTED[0], _torch.TESTED[-1]
    minor = last.rpartition(".")[0]
    assert f"torch {first.rpartition('.')[0]} to {minor}" in readme
    assert f"torch>={first.rpartition('.')[0]}," in (ROOT / "pyproject.toml").read_text()
    assert torch.__version__.rpartition(".")[0] in {
        v.rpartition(".")[0] for v in _torch.TESTED
    }, "a torch that is not in the table"
