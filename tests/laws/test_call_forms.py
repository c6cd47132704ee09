"""The law of call forms: every way to call an op is accepted and true, or refused by name.

Forms are drawn from torch's own schemas (`placements.testing.forms`) and judged against the
same line on one device. `accepted_forms.json` holds how many forms of each op are accepted
and true: refusing everything is not passing. `python -m tests.laws.test_call_forms` writes
it anew.
"""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType

import pytest
import torch

from placements import Even, Padded, PlacementError, R, S, V
from placements.inference.ops import COMPOSED, OPS
from placements.testing.forms import Report, run
from placements.testing.forms.draw import draw_form
from placements.testing.forms.form import Form
from placements.testing.forms.judge import Judgement, judge
from placements.testing.forms.operands import (
    FormOperand,
    Place,
    draw_value,
    join_value,
    place_value,
    places,
    varying,
)
from placements.testing.forms.report import reports, snippet
from placements.testing.forms.runs import Run, run_on_ranks
from placements.testing.forms.signatures import signatures
from placements.testing.forms.tensors import MESHES
from placements.types.axis import AxisType, I, P, Shard

FLOOR = Path(__file__).with_name("accepted_forms.json")
FORMS = 100
DEEP_FORMS = 2000
GROUPS = 16
TORCH = torch.__version__.partition("+")[0]

# What this machine cannot run, or what has nothing to draw.
NOT_HERE = {"cuda": "needs a device", "pin_memory": "needs a device"}

# What section 13 of the design refuses on purpose although it may be right, by the trait
# of the form.
ON_PURPOSE: dict[str, str] = {
    "tensor as integer": "a tensor in a slot that takes an integer is refused where the "
    "row of the op gives the slot no role",
    "size by position": "a size read from a piece where values depend on position (arange, "
    "slices, narrow, repeat): rank r does not hold the r-th piece of the result",
    "size as value": "a size read from a piece is Partial where it is a value, and many "
    "ops take no Partial",
    "plain size": "a constant whose sizes are plain numbers is Replicate, and a view to "
    "plain sizes that could be read in several ways is refused",
    "index by arithmetic": "what writes takes no index that arithmetic made, since nobody "
    "says which rows it counts",
    "rank": "a number of an axis in a slot whose role the row does not give",
    "tensor as number": "a tensor in a slot that takes a number is refused where the row "
    "of the op gives the slot no role",
    "size twice": "the size of one piece for two dims: no type cuts two dims over one axis",
    "size of another": "sizes of a Varying tensor are Varying numbers (view_as)",
    "unknown subscript": "a class of subscript that is not known: bools, ranges, arrays of "
    "numpy, tuples in tuples, two ellipses",
    "None as flag": "torch.ops takes None for a flag, and the schema does not",
}
# What it refuses on purpose in single ops, where the first release was right by luck: the
# drawn numbers were whole, lengths happened to agree, or Varying claimed nothing.
ON_PURPOSE_OPS: dict[str, str] = {
    "byte": "a cast of a Partial that wraps is not linear",
    "type": "a cast of a Partial to whole numbers rounds each summand",
    "sum": "a sum of a Partial in a dtype of whole numbers rounds each summand",
    "nansum": "as sum; and a sum over ranks of bools is no bool",
    "full": "a Partial of bools is no sum",
    "dropout1d dropout2d dropout3d": "a rank is no flag (inplace=), whatever it does here",
    "linalg_qr": "of matrices whose columns depend on each other torch has no gradient, so "
    "that they are not drawn",
    "bincount": "ids of a piece that nobody declared say nothing of how long the count is",
    "l1_loss": "torch does not hand `weight` on while a mode is active, so it is not seen",
    "masked_select": "pieces and masks of other rows do not fit together, and Varying "
    "would hide that",
}


# Arguments that depend on each other: tests/placements/checker/test_composed.py draws them.
# torch does not look at all shapes of the ops that need memory, and crashes in odd ones; the
# other laws draw calls of them whose shapes fit, and tests/placements/inference/flows others.
NOT_DRAWN = {"multi_head_attention_forward"} | {x for x in OPS if OPS[x].needs_memory}

# Ops that a library registered (`spmd_moe::grouped_mm`) are for that library to draw.
NAMES = sorted(op for op in {*OPS, *COMPOSED} - NOT_DRAWN if "::" not in op)


def group(number: int) -> list[str]:
    return NAMES[number::GROUPS]


def check_forms(ops: Sequence[str], forms: int) -> None:
    """Raise AssertionError if a form is accepted and false, or if fewer are accepted.

    So it does if more of what is accepted is Varying, which says nothing.
    The first forms of many are those of few, so the floor holds for any number of them.
    Another torch has other schemas, so other forms: there, some must be accepted.
    """
    report = run(ops, forms)
    floor = json.loads(FLOOR.read_text())
    known = floor["ops"] if floor["torch"] == TORCH and forms >= FORMS else {}
    lost: dict[str, str] = {}
    for op, tally in report.tallies.items():
        least = known.get(op, {"accepted": 0 if op in NOT_HERE else 1, "claimed": 0})
        if tally.accepted < least["accepted"]:
            lost[op] = f"{tally.accepted} of {tally.forms} are accepted, not {least}"
        if tally.claimed < least["claimed"]:
            lost[op] = f"{tally.claimed} accepted forms are not Varying, not {least}"
    assert (len(report.failures), lost) == (0, {}), str(report)


@pytest.mark.parametrize("number", range(GROUPS))
def test_every_form_is_true_or_refused(number: int, request: pytest.FixtureRequest) -> None:
    deep = request.config.getoption("--placements-profile") == "deep"
    check_forms(group(number), DEEP_FORMS if deep else FORMS)


def test_every_op_of_the_table_is_drawn() -> None:
    assert [op for op in NAMES if not signatures(op)] == []
    assert sorted(json.loads(FLOOR.read_text())["ops"]) == NAMES


def test_a_seed_draws_the_same_forms_each_time() -> None:
    def lines() -> list[str]:
        rng = random.Random(3)
        return [draw_form(rng, op).line for op in ("sum", "add", "__getitem__", "zeros")]

    assert lines() == lines()


def test_forms_vary_as_the_design_asks() -> None:
    rng = random.Random(0)
    drawn = [
        draw_form(rng, op)
        for op in ("sum", "narrow", "add", "new_zeros", "__getitem__", "view_as")
        for _ in range(400)
    ]
    lines = [form.line for form in drawn]
    for wanted in ("axis=", "dim=", "keepdims=", "x2=", "input=", "np.int64(", "np.float32(", ".shape[",
                   ".size(", ".numel()", "len(", "axis_rank(", "coordinate[", "torch.ops.aten", "...", "None",
                   "np.array", "range(", "True", "+= ", "add_(", "out=", "x[", "-1", "[", "("):  # fmt: skip
        assert any(wanted in line for line in lines), wanted
    assert {trait for form in drawn for trait in form.traits} == ON_PURPOSE.keys()
    on_purpose = {op for ops in ON_PURPOSE_OPS for op in ops.split()}
    assert on_purpose <= {*OPS, *COMPOSED}
    types = [list(x.types.items()) for form in drawn for x in form.operands.values()]
    assert any(t == P for each in types for _, t in each)
    assert any(
        isinstance(getattr(t, "extent", None), Padded) for each in types for _, t in each
    )
    both = [
        each
        for each in types
        if len(each) == 2
        and all(isinstance(t, Shard) for _, t in each)
        and len({getattr(t, "dim", 0) for _, t in each}) == 1
    ]
    assert {each[0][0] for each in both} == {"a", "b"}, "both orders of two cuts of one dim"
    assert any(form.sizes["a"] in next(iter(x.values.values())).shape and any(
        t == S(d) for d, n in enumerate(next(iter(x.values.values())).shape) if n == form.sizes["a"] for t in x.types.values()
    ) for form in drawn for x in form.operands.values()), "one row per rank"  # fmt: skip


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("types", [
    {"a": R, "b": S(0)}, {"b": S(0, Even(6)), "a": S(0, Padded(3))}, {"a": P, "b": V}, {"a": V, "b": P},
    {"a": S(1), "b": S(0)}, {"a": I, "b": R}, {"a": P, "b": P},
])  # fmt: skip
def test_values_are_placed_and_joined(
    sizes: dict[str, int], types: dict[str, AxisType]
) -> None:
    rng = random.Random(1)
    types = {axis: t for axis, t in types.items() if axis in sizes}
    if "b" not in sizes and isinstance(types["a"], S):
        types["a"] = S(types["a"].dim)
    values = {
        where: draw_value(rng, [6, 2], torch.float64)
        for where in places(sizes, varying(types))
    }
    held = place_value(values, types, sizes, rng)
    joined = join_value(held, types, sizes)
    assert joined.keys() == values.keys()
    for where in joined:
        assert torch.equal(joined[where], values[where])


# The judge itself, with planted lies.


def form_of(
    line: str,
    sizes: dict[str, int],
    target: str = "",
    **operands: tuple[list[int], dict[str, AxisType]],
) -> Form:
    rng = random.Random(0)
    form = Form("planted", "planted", sizes, line, target=target)
    for name, (shape, types) in operands.items():
        values = {
            where: draw_value(rng, shape, torch.float64, "distinct")
            for where in places(sizes, varying(types))
        }
        form.operands[name] = FormOperand(
            name, types, values, place_value(values, types, sizes, rng)
        )
    for axis in sizes:
        if f"'{axis}'" in line:
            form.rank_axes.add(axis)
    return form


def verdict(form: Form, lie: Callable[[Place, Run], None] | None = None) -> str:
    def with_lie(form: Form, code: CodeType) -> dict[Place, Run] | None:
        ranks = run_on_ranks(form, code)
        if ranks is not None and lie is not None:
            for place, each in ranks.items():
                lie(place, each)
        return ranks

    return judge(form, random.Random(0), with_lie).kind


A2, AB = {"a": 2}, {"a": 2, "b": 2}
CUT: dict[str, AxisType] = {"a": S(0, Even(4))}


@pytest.mark.parametrize("form, kind", [
    (form_of("x.sum(1)", A2, x=([4, 3], CUT)), "accepted"),
    (form_of("x.sum(0)", A2, x=([4, 3], CUT)), "accepted"),
    (form_of("x + y", A2, x=([4, 3], CUT), y=([3], {"a": R})), "accepted"),
    (form_of("x @ y", A2, x=([3, 4], {"a": S(1, Even(4))}), y=([4, 2], CUT)), "accepted"),
    (form_of("x * y", A2, x=([4], {"a": P}), y=([4], {"a": R})), "accepted"),
    (form_of("x * y", A2, x=([4], {"a": V}), y=([4], {"a": R})), "accepted"),
    (form_of("x.add_(y)", A2, "x", x=([4], {"a": P}), y=([4], {"a": P})), "accepted"),
    (form_of("x.sum(0)", AB, x=([6, 3], {"b": S(0, Even(6)), "a": S(0, Padded(3))})), "accepted"),
    (form_of("torch.rand_like(x) * axis_rank('a')", A2, x=([4], CUT)), "accepted"),
    (form_of("x.exp()", A2, x=([4], {"a": P})), "refused"),
    (form_of("x + y", A2, x=([4], {"a": I}), y=([4], {"a": R})), "refused"),
    (form_of("x.view(7)", A2, x=([4], {"a": R})), "invalid"),
    (form_of("x +", A2, x=([4], {"a": R})), "invalid"),
], ids=lambda x: x.line if isinstance(x, Form) else x)  # fmt: skip
def test_honest_forms(form: Form, kind: str) -> None:
    assert verdict(form) == kind


def says(types: dict[str, AxisType]) -> Callable[[Place, Run], None]:
    def lie(place: Place, each: Run) -> None:
        each.types = [dict(types)]

    return lie


def scales(name: str, factor: float) -> Callable[[Place, Run], None]:
    """The value stays, its gradient is multiplied."""

    def lie(place: Place, each: Run) -> None:
        y = each.outputs[0]
        each.outputs = [y.detach() + factor * (y - y.detach())]

    return lie


def one_rank_refuses(place: Place, each: Run) -> None:
    if dict(place)["a"]:
        each.error = PlacementError("planted")


def other_type_on_one_rank(place: Place, each: Run) -> None:
    if dict(place)["a"]:
        each.types = [{"a": R}]


def no_type(place: Place, each: Run) -> None:
    each.types = [None]


@pytest.mark.parametrize("form, lie, kind", [
    (form_of("x.sum(1)", A2, x=([4, 3], CUT)), says({"a": R}), "false"),
    (form_of("x.sum(1)", A2, x=([4, 3], CUT)), says({"a": P}), "false"),
    (form_of("x.sum(1)", A2, x=([4, 3], CUT)), says({"a": S(0, Padded(5))}), "false"),
    (form_of("x.sum(1)", A2, x=([4, 3], CUT)), says({"a": S(1)}), "false"),
    (form_of("x.sum(1)", A2, x=([4, 3], CUT)), no_type, "false"),
    (form_of("x.sum(1)", A2, x=([4, 3], CUT)), other_type_on_one_rank, "disagree"),
    (form_of("x.sum(1)", A2, x=([4, 3], CUT)), one_rank_refuses, "disagree"),
    (form_of("x.sum(1)", A2, x=([4, 3], CUT)), scales("x", 2.0), "false"),
    (form_of("x.sum(1)", A2, x=([4, 3], CUT)), scales("x", 0.0), "false"),
    (form_of("x * 2", A2, x=([4], {"a": R})), says({"a": P}), "false"),
    (form_of("x * 2", A2, x=([4], {"a": R})), says({"a": I}), "false"),  # by its gradient
    (form_of("x * 2", A2, x=([4], {"a": I})), says({"a": R}), "false"),  # by its gradient
    (form_of("x * 2", A2, x=([4], {"a": I})), says({"a": V}), "false"),  # by its gradient
    (form_of("x * 2", A2, x=([4], {"a": V})), says({"a": R}), "false"),
    (form_of("x * 2", A2, x=([4], {"a": V})), says({"a": S(0, Even(8))}), "false"),
    (form_of("x * 2", A2, x=([4], {"a": P})), says({"a": R}), "false"),
    (form_of("x * 2", A2, x=([4], {"a": P})), says({"a": V}), "accepted"),  # V claims nothing
    (form_of("x.mul_(2)", A2, "x", x=([4], {"a": P})), says({"a": R}), "false"),
    (form_of("torch.rand_like(x) * axis_rank('a')", A2, x=([4], CUT)), says(CUT), "false"),
    (form_of("x * 2", AB, x=([4], {"b": S(0, Even(4)), "a": S(0, Even(2))})),
     says({"a": S(0, Even(4)), "b": S(0, Even(2))}), "false"),
], ids=lambda x: x.line if isinstance(x, Form) else None)  # fmt: skip
def test_planted_lies(form: Form, lie: Callable[[Place, Run], None], kind: str) -> None:
    assert verdict(form, lie) == kind


def test_torch_errors_on_a_rank_are_told_from_refusals() -> None:
    def raises(place: Place, each: Run) -> None:
        try:
            raise RuntimeError("planted")
        except RuntimeError as error:
            each.error = error

    assert verdict(form_of("x.sum(1)", A2, x=([4, 3], CUT)), raises) == "torch"


def test_a_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    form = form_of("x.sum(1) * y", A2, x=([4, 3], CUT), y=([], {"a": R}))
    exec(snippet(form, Judgement("false", "planted")), {})
    assert capsys.readouterr().out.count("{a:S(0)}") == 2


def write_floor() -> None:
    report = Report()
    for found in reports(NAMES, FORMS, 0, jobs=2):
        report.add(found)
    ops = {
        op: {
            "forms": tally.forms,
            "accepted": tally.accepted,
            "claimed": tally.claimed,
            "plain forms": tally.plain,
            "plain accepted": tally.plain_accepted,
            "refused by trait": dict(sorted(tally.by_trait.items())),
        }
        for op, tally in sorted(report.tallies.items())
    }
    lines = [f'    "{op}": {json.dumps(counts)}' for op, counts in ops.items()]
    FLOOR.write_text(
        f'{{\n  "torch": "{TORCH}",\n  "ops": {{\n' + ",\n".join(lines) + "\n  }\n}\n"
    )
    print(report)


if __name__ == "__main__":
    write_floor()
