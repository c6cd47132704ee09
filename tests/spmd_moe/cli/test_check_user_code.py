"""`spmd-moe check --module` when the user's code raises: one line that says where."""

from pathlib import Path

import pytest

from spmd_moe.checks.errors import BadInput
from spmd_moe.cli.main import main

HEAD = """\
from typing import Annotated
from jaxtyping import Float
from torch import Tensor, nn
from placements import On, S, typed

Rows = Annotated[Float[Tensor, "T D"], On(tp=S(0))]

@typed
class Layer(nn.Module):
    def forward(self, x_TD: Rows) -> Rows:
        return x_TD * 2
"""
INIT = (
    "        return x_TD * 2\n    def __init__(self):\n        super().__init__()\n        "
)

# What is wrong -> the source, its line, and what is said.
BROKEN: dict[str, tuple[str, int, str]] = {
    "syntax": ("def f(:\n    pass\n", 1, "SyntaxError: invalid syntax"),
    "at_import": (f"{HEAD}1 / 0\n", 12, "ZeroDivisionError: division by zero"),
    "imports": ("import no_such_thing\n", 1, "ModuleNotFoundError: No module named 'no_such"),
    "exits": ("\nraise SystemExit('bye')\n", 2, "SystemExit: bye"),
    "in_init": (
        HEAD.replace("        return x_TD * 2\n", INIT + "raise KeyError('size')\n"), 14,
        "KeyError: 'size'",
    ),
    "in_forward": (HEAD.replace("x_TD * 2", "x_TD.nothing"), 11, "AttributeError: 'Tensor'"),
    "asserts": (HEAD.replace("return x_TD * 2", "assert False"), 11, "AssertionError ("),
    "annotation": (
        HEAD.replace("x_TD: Rows", "x_TD: 'Nowhere'"), 10,
        "NameError: name 'Nowhere' is not defined",
    ),
    "attribute": (
        HEAD.replace("    def", "    w: 'Nowhere'\n    def"), 8,
        "NameError: name 'Nowhere' is not defined",
    ),
    "reference": (
        HEAD + "    @staticmethod\n    def reference(y_TD, weights):\n        return y_TD\n", 8,
        "TypeError: Layer.reference() got an unexpected keyword argument 'x_TD'",
    ),
    "in_reference": (
        HEAD + "    @staticmethod\n    def reference(x_TD, weights):\n        return x_TD[9]\n",
        14, "IndexError: index 9 is out of bounds",
    ),
}  # fmt: skip


@pytest.fixture
def broken(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, int, str]:
    """The class to name, the line to blame, and what is said."""
    source, line, said = BROKEN[request.param]
    module = f"user_module_{request.param}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"{module}.Layer", line, said


@pytest.mark.parametrize("broken", BROKEN, indirect=True)
def test_it_is_one_line_with_its_place(
    broken: tuple[str, int, str], capsys: pytest.CaptureFixture[str]
) -> None:
    name, line, said = broken
    assert main(["check", "--module", name, "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"spmd-moe check: --module {name}: {said}")
    place = f"({name.removesuffix('.Layer')}.py:{line}); --debug shows all\n"
    assert shown.err.endswith(place) and shown.err.count("\n") == 1 and not shown.out


@pytest.mark.parametrize("broken", ["in_init"], indirect=True)
def test_debug_shows_all(broken: tuple[str, int, str]) -> None:
    with pytest.raises(BadInput) as caught:
        main(["check", "--module", broken[0], "--debug"])
    assert isinstance(caught.value.__cause__, KeyError)
