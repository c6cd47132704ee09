"""The layout is what the READMEs say: imports go down, files are small, maps are complete.

A rule is a function from the project's files to complaints. So each rule is also tried on a
copy of the files into which one mistake was planted, and must complain of it.
"""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

# The text of every file of the project that a rule looks at, by its path.
Tree = dict[str, str]
Rule = Callable[[Tree], list[str]]

# Layer -> the layers that it may import. The files of a layer may import each other. A layer
# is a folder, or a file at the top of the package.
BELOW_RUNTIME = "_torch types inference"
BELOW_TESTING = (
    f"{BELOW_RUNTIME} runtime collectives checker annotations parameters verification"
)
PLACEMENTS = {
    "_torch": "",
    "version": "",
    "types": "_torch",
    "inference": "types",
    "runtime": BELOW_RUNTIME,
    "collectives": f"{BELOW_RUNTIME} runtime",
    "checker": f"{BELOW_RUNTIME} runtime",
    "annotations": f"{BELOW_RUNTIME} runtime collectives checker",
    "parameters": f"{BELOW_RUNTIME} runtime collectives annotations",
    "verification": f"{BELOW_RUNTIME} runtime collectives checker",
    "__init__": f"version {BELOW_TESTING}",
    "testing": f"__init__ {BELOW_TESTING}",
    "interop": f"__init__ {BELOW_TESTING} testing",
    "rulebook": BELOW_TESTING,
    "demo": BELOW_TESTING,
    "__main__": "demo rulebook",
}
# The layer is every file at the top but `__main__`, with the `__init__`; the basis is three of
# these files, which know nothing of the layer.
BASIS = ("dims", "permute", "precision")
SPMD_MOE = {
    "basis": "",
    "paths": "basis",
    "compute": "basis paths",
    "layer": "basis paths compute",
    "checks": "basis paths compute layer",
    "training": "basis paths compute layer",
    "bugs": "basis paths compute layer",
    "lint": "",
    "cli": "basis paths compute layer checks training bugs lint",
    "__main__": "cli",
}
# What the layers of spmd_moe may import of placements: "" stands for its public names, and
# "*" for any of its files.
# "lint" imports nothing of it: it has no entry.
OF_PLACEMENTS = {
    "basis": "", "paths": "", "compute": "", "layer": "", "checks": "*", "training": "*",
    "bugs": "*", "cli": "*",
}  # fmt: skip

# Where attributes of torch may be replaced: while checking is on, in the simulator, and
# where the inside of torch is touched at all.
REPLACES = (
    "placements/checker/patches.py",
    "placements/testing/ranks/run.py",
    "placements/_torch/distributed.py",
    "placements/_torch/fsdp.py",
    "placements/_torch/tensors.py",
)
# Where an attribute of ours is named: those of tensors and modules, the mesh that a
# DeviceMesh keeps, and the probe that such attributes are not saved.
NAMES_ATTRIBUTES = (
    "placements/runtime/tags.py",
    "placements/types/mesh.py",
    "placements/_torch/probes.py",
)

MODULES_IN_A_FOLDER = 18
FILES_AT_THE_TOP = 10
LINES = 350
# Files that may have more lines, how many, and why a cut would make them harder to read.
EXCEPTIONS = {
    "placements/collectives/request.py": (400, "one call from its arguments to its result"),
    "placements/inference/ops.py": (480, "a table"),
    "placements/parameters/gradients.py": (430, "one plan: look at all, sum, mark"),
    "placements/_torch/probes.py": (410, "a table: a probe for each use"),
    "placements/runtime/gradient_watch.py": (410, "the states of one gradient in backward"),
    "placements/testing/ranks/run.py": (
        370,
        "one call: its checks, its world, its results",
    ),
    "placements/testing/compare/drawn_cases.py": (400, "a case, drawn and printed as code"),
    "placements/types/extents.py": (450, "a table: one class for each extent"),
    "placements/verification/mode.py": (390, "one mode: everything that it logs"),
}

# Tests of a whole package are named after no file of it.
OF_A_PACKAGE = {"tests/placements/test_imports.py", "tests/spmd_moe/test_imports.py"}


def files_of_the_project() -> Tree:
    found: Tree = {}
    for folder in ("placements", "spmd_moe", "tests"):
        for pattern in ("*.py", "README.md"):
            for file in sorted((ROOT / folder).rglob(pattern)):
                found[file.relative_to(ROOT).as_posix()] = file.read_text()
    return found


OP_NAME = re.compile(r"(\w+\.)*op\.name")


def package(tree: Tree, name: str) -> Tree:
    return {f: t for f, t in tree.items() if f.startswith(f"{name}/") and f.endswith(".py")}


parsed = cache(ast.parse)


class Import(NamedTuple):
    file: str
    line: int
    target: str  # the file of ours that is imported

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"


def file_of(module: str, tree: Tree) -> str | None:
    path = module.replace(".", "/")
    return next((f for f in (f"{path}.py", f"{path}/__init__.py") if f in tree), None)


def imports_of(file: str, tree: Tree) -> Iterator[Import]:
    """Every import of a file of ours, wherever it stands in the file."""
    for node in ast.walk(parsed(tree[file])):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(Path(file).parts[: -node.level]) if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            names = [f"{base}.{alias.name}" for alias in node.names]
            modules = [name if file_of(name, tree) else base for name in names]
        for module in modules:
            target = file_of(module, tree)
            if target is not None:
                yield Import(file, node.lineno, target)


def imports(tree: Tree) -> list[Import]:
    ours = package(tree, "placements") | package(tree, "spmd_moe")
    return [found for file in ours for found in imports_of(file, tree)]


def layer_of(file: str) -> str:
    """The folder right below the package, or the file at its top."""
    parts = Path(file).with_suffix("").parts
    if parts[0] == "spmd_moe" and len(parts) == 2 and parts[1] != "__main__":
        return "basis" if parts[1] in BASIS else "layer"
    return parts[1]


# The rules.


def imports_go_down(tree: Tree, name: str, layers: dict[str, str]) -> list[str]:
    """An import goes to the same layer, or to one that the table allows."""
    found: list[str] = []
    for one in imports(tree):
        if not one.file.startswith(f"{name}/"):
            continue
        here, there = layer_of(one.file), layer_of(one.target)
        if here not in layers:
            found.append(f"{one.file} lies in no layer")
        elif not one.target.startswith(f"{name}/"):
            allowed = OF_PLACEMENTS.get(here) if name == "spmd_moe" else None
            is_public = one.target == "placements/__init__.py"
            if allowed is None or not (allowed == "*" or is_public):
                found.append(str(one))
        elif here != there and there not in layers[here].split():
            found.append(str(one))
    return found


def imports_go_down_in_placements(tree: Tree) -> list[str]:
    return imports_go_down(tree, "placements", PLACEMENTS)


def imports_go_down_in_spmd_moe(tree: Tree) -> list[str]:
    return imports_go_down(tree, "spmd_moe", SPMD_MOE)


def no_files_import_each_other(tree: Tree) -> list[str]:
    graph: dict[str, set[str]] = {}
    for one in imports(tree):
        graph.setdefault(one.file, set()).add(one.target)
    found: list[str] = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            cycle: list[str] = error.args[1]
            found.append(" is imported by ".join(cycle))
            graph[cycle[1]].discard(cycle[0])  # to find the next one
        else:
            return found


def inference_is_pure(tree: Tree) -> list[str]:
    """It names no torch, and nothing that it imports reaches the state of a run."""
    found: list[str] = []
    start = [f for f in package(tree, "placements") if layer_of(f) == "inference"]
    for file in start:
        for node in ast.walk(parsed(tree[file])):
            names: list[str] = []
            if isinstance(node, ast.Name):
                names = [node.id]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(name.split(".")[0] == "torch" for name in names):
                found.append(f"{file}:{node.lineno} names torch")
    reached = list(start)
    for file in reached:
        for one in imports_of(file, tree):
            if layer_of(one.target) == "runtime":
                found.append(f"inference reaches the run-time state: {one}")
            elif one.target not in reached:
                reached.append(one.target)
    return found


def facts_of_ops_are_in_their_rows(tree: Tree) -> list[str]:
    """The name of an op is text for messages: no flow reads it, and nothing compares it."""
    found: list[str] = []
    for file, text in package(tree, "placements").items():
        for node in ast.walk(parsed(text)):
            if layer_of(file) == "inference":
                asks = [node] if isinstance(node, ast.Attribute) else []
            elif layer_of(file) == "checker":
                is_asked = isinstance(node, ast.Compare | ast.Subscript | ast.Match)
                asks = ast.walk(node) if is_asked else ()
            else:
                asks = ()
            for each in asks:
                if isinstance(each, ast.expr) and OP_NAME.fullmatch(ast.unparse(each)):
                    found.append(f"{file}:{each.lineno} asks for the name of an op")
    return found


def attributes_are_named_in_one_place(tree: Tree) -> list[str]:
    found: list[str] = []
    for file, text in (package(tree, "placements") | package(tree, "spmd_moe")).items():
        for node in ast.walk(parsed(text)):
            name = node.attr if isinstance(node, ast.Attribute) else None
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value
            is_ours = name is not None and name.startswith("_placements_")
            if is_ours and file not in NAMES_ATTRIBUTES:
                found.append(f"{file}:{node.lineno} names {name}")
    return found


def torch_is_replaced_in_one_place(tree: Tree) -> list[str]:
    """No assignment to an attribute of something that was imported from torch."""
    found: list[str] = []
    for file, text in (package(tree, "placements") | package(tree, "spmd_moe")).items():
        of_torch = set(names_of_torch(parsed(text)))
        for owner in owners_of_changed_attributes(parsed(text)):
            root = owner
            while isinstance(root, ast.Attribute):
                root = root.value
            is_torch = isinstance(root, ast.Name) and root.id in of_torch
            if is_torch and file not in REPLACES:
                found.append(f"{file}:{owner.lineno} changes {ast.unparse(owner)}")
    return found


def names_of_torch(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    yield alias.asname or "torch"
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] == "torch":
                yield from (alias.asname or alias.name for alias in node.names)


def owners_of_changed_attributes(tree: ast.AST) -> Iterator[ast.expr]:
    """What is before the dot of a target, or comes after `setattr` in a call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.value
        elif isinstance(node, ast.Call):
            for function, owner in zip([node.func, *node.args], node.args, strict=False):
                name = function.id if isinstance(function, ast.Name) else None
                if name in ("setattr", "delattr"):
                    yield owner


def folders_are_small(tree: Tree) -> list[str]:
    found: list[str] = []
    ours = package(tree, "placements") | package(tree, "spmd_moe")
    folders = [str(Path(file).parent) for file in ours]
    for folder in sorted(set(folders)):
        modules = folders.count(folder) - (f"{folder}/__init__.py" in ours)
        if modules > MODULES_IN_A_FOLDER:
            found.append(f"{folder} has {modules} modules")
    if folders.count("placements") > FILES_AT_THE_TOP:
        found.append(f"placements has {folders.count('placements')} files at its top")
    return found


def files_are_short(tree: Tree) -> list[str]:
    ours = package(tree, "placements") | package(tree, "spmd_moe")
    lines = {file: text.count("\n") for file, text in ours.items()}
    limits = {file: limit for file, (limit, _) in EXCEPTIONS.items()}
    return [f"{f} has {n} lines" for f, n in lines.items() if n > limits.get(f, LINES)]


def exceptions_are_needed(tree: Tree) -> list[str]:
    """A file that became short, or went away, needs no exception any more."""
    return [f for f in EXCEPTIONS if f not in tree or tree[f].count("\n") <= LINES]


def folders(tree: Tree) -> list[str]:
    ours = package(tree, "placements") | package(tree, "spmd_moe")
    return sorted({str(Path(file).parent) for file in ours})


def every_folder_has_a_map(tree: Tree) -> list[str]:
    return [folder for folder in folders(tree) if f"{folder}/README.md" not in tree]


def maps_name_exactly_the_files(tree: Tree) -> list[str]:
    """The items "- `file.py`: ..." and "- `folder/`: ..." of a README are what lies there.

    An `__init__.py` may be left out.
    """
    found: list[str] = []
    for folder in folders(tree):
        readme = f"{folder}/README.md"
        if readme not in tree:
            continue
        named = set(re.findall(r"^ *[-*] `(\w+(?:\.py|/))`", tree[readme], re.MULTILINE))
        below = [
            Path(f).relative_to(folder).parts for f in tree if f.startswith(f"{folder}/")
        ]
        there = {
            p[0] if len(p) == 1 else f"{p[0]}/" for p in below if p[-1].endswith(".py")
        }
        found += [f"{readme} does not name {f}" for f in sorted(there - named)]
        found += [f"{readme} names {f}, which is not there" for f in sorted(named - there)]
    return [line for line in found if not line.endswith("does not name __init__.py")]


def names_of_tests_say_where_they_lie(tree: Tree, name: str) -> list[str]:
    """`tests/a/b/test_c_x.py` tests `a/b/c.py`, a folder `a/b/c`, or the `__init__` of b."""
    found: list[str] = []
    tests = [f for f in package(tree, f"tests/{name}") if Path(f).name.startswith("test_")]
    for test in sorted(set(tests) - OF_A_PACKAGE):
        folder = Path(test).relative_to("tests").parent
        subject = Path(test).stem.removeprefix("test_")
        beside = [
            Path(f).relative_to(folder).parts[0]
            for f in tree
            if f"{folder}/" == f[: len(f"{folder}/")]
        ]
        subjects = [folder.name, *(Path(f).stem.removeprefix("_") for f in beside)]
        if not any(f"{subject}_".startswith(f"{one}_") for one in subjects):
            found.append(f"{test} is named after nothing in {folder}")
    return found


def the_tests_mirror_placements(tree: Tree) -> list[str]:
    return names_of_tests_say_where_they_lie(tree, "placements")


def the_tests_mirror_spmd_moe(tree: Tree) -> list[str]:
    return names_of_tests_say_where_they_lie(tree, "spmd_moe")


# A mistake: a file, and a line that is added at its end.
PLANTS: list[tuple[Rule, str, str]] = [
    (imports_go_down_in_placements, "placements/types/axis.py", "import placements.runtime.tags"),
    (imports_go_down_in_placements, "placements/types/axis.py",
     "if TYPE_CHECKING:\n    from placements.inference.op import Op"),
    (imports_go_down_in_placements, "placements/runtime/tags.py",
     "def f() -> None:\n    from placements.checker import mode"),
    (imports_go_down_in_placements, "placements/checker/mode.py", "from placements import convert"),
    (imports_go_down_in_placements, "placements/checker/mode.py", "from ..collectives import moves"),
    (imports_go_down_in_placements, "placements/_torch/tensors.py", "import placements"),
    (imports_go_down_in_placements, "placements/testing/plugin.py", "import spmd_moe"),
    (imports_go_down_in_placements, "placements/loose.py", "from placements.types import axis"),
    (imports_go_down_in_spmd_moe, "spmd_moe/route.py", "from placements.types.axis import R"),
    (imports_go_down_in_spmd_moe, "spmd_moe/route.py", "from placements import _torch"),
    (imports_go_down_in_spmd_moe, "spmd_moe/route.py", "import spmd_moe.training.text"),
    (imports_go_down_in_spmd_moe, "spmd_moe/paths/own.py", "import spmd_moe.layouts"),
    (imports_go_down_in_spmd_moe, "spmd_moe/dims.py", "import spmd_moe.paths.own"),
    (imports_go_down_in_spmd_moe, "spmd_moe/training/text.py", "import spmd_moe.cli.main"),
    (imports_go_down_in_spmd_moe, "spmd_moe/training/text.py", "import spmd_moe.bugs.record"),
    (imports_go_down_in_spmd_moe, "spmd_moe/lint/files.py", "import placements"),
    (no_files_import_each_other, "placements/types/axis.py",
     "if TYPE_CHECKING:\n    from placements.types import tensor"),
    (inference_is_pure, "placements/inference/flows/views.py", "import torch.nn"),
    (inference_is_pure, "placements/inference/flows/views.py", "from torch import Tensor"),
    (inference_is_pure, "placements/types/axis.py", "from placements.runtime import tags"),
    (facts_of_ops_are_in_their_rows, "placements/inference/flows/views.py", "f(op.name)"),
    (facts_of_ops_are_in_their_rows, "placements/checker/call.py", "x = call.op.name == 'add'"),
    (facts_of_ops_are_in_their_rows, "placements/checker/call.py", "x = self.call.op.name in Y"),
    (facts_of_ops_are_in_their_rows, "placements/checker/call.py", "x = Y[op.name]"),
    (attributes_are_named_in_one_place, "placements/checker/call.py", "x = '_placements_type'"),
    (attributes_are_named_in_one_place, "spmd_moe/layer.py", "x._placements_type"),
    (torch_is_replaced_in_one_place, "placements/checker/guards.py",
     "from torch import nn as net\nnet.Module.forward = None"),
    (torch_is_replaced_in_one_place, "spmd_moe/layer.py",
     "import torch\npartial(setattr, torch.Tensor, 'add', None)"),
    (folders_are_small, "placements/loose_{}.py", ""),
    (folders_are_small, "placements/inference/flows/loose_{}.py", ""),
    (files_are_short, "placements/types/axis.py", "\n" * 400),
    (every_folder_has_a_map, "placements/loose/one.py", ""),
    (maps_name_exactly_the_files, "placements/inference/loose.py", ""),
    (maps_name_exactly_the_files, "placements/inference/README.md", "- `loose.py`: nothing."),
    (the_tests_mirror_placements, "tests/placements/types/test_loose.py", ""),
    (the_tests_mirror_spmd_moe, "tests/spmd_moe/test_loose.py", ""),
]  # fmt: skip

RULES: list[Rule] = [*dict.fromkeys(rule for rule, _, _ in PLANTS), exceptions_are_needed]


@pytest.fixture(scope="module")
def tree() -> Tree:
    return files_of_the_project()


def planted(tree: Tree, file: str, line: str) -> Tree:
    """A copy with the line at the end of the file; "{}" stands for twenty files."""
    changed = dict(tree)
    for number in range(20 if "{}" in file else 1):
        name = file.format(number)
        changed[name] = f"{tree.get(name, '')}\n{line}\n"
    return changed


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_project_obeys(rule: Rule, tree: Tree) -> None:
    assert rule(tree) == []


@pytest.mark.parametrize(("rule", "file", "line"), PLANTS)
def test_a_planted_mistake_is_found(rule: Rule, file: str, line: str, tree: Tree) -> None:
    assert set(rule(planted(tree, file, line))) - set(rule(tree))
