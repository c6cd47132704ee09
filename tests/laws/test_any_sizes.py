"""The law of the memo: a type that is served for other sizes is the type inferred for them.

Forms of every op (`placements.testing.forms`) are run one after the other, so that what was
learned from one is served to the next: other sizes, sizes 0 and 1, one row per rank, uneven
pieces, sizes read from pieces, views to -1. Then each is run with an empty memo.
"""

import itertools
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from types import CodeType
from typing import Any

import pytest

from placements import type_of
from placements.inference.ops import OPS
from placements.inference.templates import Pattern, _AnyEven
from placements.testing.forms.draw import draw_form
from placements.testing.forms.form import Form
from placements.testing.forms.operands import size_of_letter
from placements.testing.forms.runs import run_on_one_device, run_on_ranks, source_of
from placements.types.axis import AxisType, Shard
from placements.types.extents import Even
from placements.types.mesh import Mesh

FORMS, DEEP_FORMS = 8, 200
GROUPS = 8
# In ops that need memory torch crashes where drawn shapes do not fit together.
NAMES = sorted(op for op in OPS if "::" not in op and not OPS[op].needs_memory)


@pytest.fixture
def meshes(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Mesh]:
    """The meshes on which forms run, with nothing learned yet."""
    made: dict[Any, Mesh] = {}
    monkeypatch.setattr("placements.testing.forms.runs._meshes", made)
    return made


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many types were served for other sizes, by op."""
    counts: Counter[str] = Counter()
    known = Pattern.known

    def counted(self: Pattern) -> Any:
        found = known(self)
        counts[self.key[0].op.name] += found is not None
        return found

    monkeypatch.setattr(Pattern, "known", counted)
    return counts


# How much longer the letters of a form become, and which: all of them, or the first alone.
# Six rows more fit every mesh as the rows before did.
LONGER = ((0, None), (6, None), (12, None), (6, 0), (12, 0))
# A convolution of five long dims would need more memory than a machine has.
MOST_ELEMENTS = 20_000


def forms_of(op: str, count: int) -> Iterator[Form]:
    """Draw forms, each in several sizes."""
    for number in range(count):
        for more, which in LONGER:
            letters = itertools.count()

            def sized(rng: Any, sizes: Any, more: int = more, which: Any = which) -> int:
                longer = which is None or next(letters) == which  # noqa: B023 - called here
                return size_of_letter(rng, sizes) + more * longer

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("placements.testing.forms.tensors.size_of_letter", sized)
                form = draw_form(random.Random(f"{op} {number}"), op)
            values = (v for x in form.operands.values() for v in x.values.values())
            if all(v.numel() <= MOST_ELEMENTS for v in values):
                yield form


def check_op(op: str, count: int, meshes: dict[Any, Mesh]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of some forms, once
        for form in forms_of(op, count):
            try:
                code = compile(source_of(form), "<form>", "exec")
            except SyntaxError:
                continue
            if run_on_one_device(form, code) is not None:
                check_form(form, code, meshes)


def check_form(form: Form, code: CodeType, meshes: dict[Any, Mesh]) -> None:
    with_memo = outcome(form, code)
    kept = [(mesh, dict(mesh.inferred), dict(mesh.templates)) for mesh in meshes.values()]
    for mesh in meshes.values():
        mesh.inferred.clear()
        mesh.templates.clear()
    assert with_memo == outcome(form, code), (form.line, form.operands)
    for mesh, inferred, templates in kept:
        mesh.inferred.update(inferred)
        mesh.templates.update(templates)


def outcome(form: Form, code: CodeType) -> Any:
    """The types on every rank, or what is refused there."""
    ranks = run_on_ranks(form, code)
    return ranks and {
        rank: [type_of(x) for x in run.outputs] if run.error is None else repr(run.error)
        for rank, run in ranks.items()
    }


@pytest.mark.parametrize("number", range(GROUPS))
def test_what_is_served_is_what_is_inferred(
    number: int,
    meshes: dict[Any, Mesh],
    served: Counter[str],
    request: pytest.FixtureRequest,
) -> None:
    deep = request.config.getoption("--placements-profile") == "deep"
    for op in NAMES[number::GROUPS]:
        check_op(op, DEEP_FORMS if deep else FORMS, meshes)
    assert sum(served.values()) > 100, served


def test_the_law_sees_a_pattern_that_forgets_which_extent_is_whose(
    meshes: dict[Any, Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(self: Pattern, t: AxisType) -> AxisType:
        cut = isinstance(t, Shard) and isinstance(t.extent, _AnyEven)
        return Shard(t.dim, Even(*self.extents[0])) if cut else t

    monkeypatch.setattr(Pattern, "_with_value", forgetful)
    with pytest.raises(AssertionError):
        for op in ("neg", "relu", "silu", "transpose"):  # tensors cut twice
            check_op(op, 60, meshes)
