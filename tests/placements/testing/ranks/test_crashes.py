"""A failure of the checker is told as one, and never counted as a refusal."""

import json
import sys
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import pytest
import torch
from hypothesis import find
from jaxtyping import Float
from torch import Tensor

from placements import (
    Even,
    On,
    P,
    PlacementError,
    R,
    Ragged,
    S,
    all_reduce,
    assert_type,
    region,
    reinterpret_mesh,
    typed,
)
from placements._torch import probes
from placements.checker.mode import Typecheck
from placements.inference import combine as infer
from placements.testing import RankFailure, assert_spmd_equivalent, check_spmd_case
from placements.testing.cases.table import calls
from placements.testing.compare.case import refusal
from placements.testing.laws.kept_numbers import is_kept
from placements.testing.laws.loss_types import check_loss
from placements.testing.laws.padding_ignored import check_padding, padded_calls
from placements.testing.laws.placed_calls import placed_calls
from placements.testing.laws.sound import check_sound
from placements.testing.ranks.crashes import CheckerCrash, check_judged
from placements.verification.mode import Verify
from spmd_moe.bugs.catalogue import BUGS
from spmd_moe.bugs.findings import find_all, summary
from spmd_moe.bugs.measure import CRASHED, measure
from spmd_moe.bugs.peers.opinions import CRASHES, SameWords, opinion_of
from spmd_moe.cli.main import main

DEFECT = "this is a defect of placements, not a verdict on the program"


def raising(error: Exception) -> Callable[..., Any]:
    def crash(*args: Any, **kwargs: Any) -> Any:
        raise error

    return crash


def at_entry(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr("placements.checker.block._entering", raising(error))


def at_an_op(monkeypatch: pytest.MonkeyPatch, error: Exception, *names: str) -> None:
    wanted = names or ("mul", "matmul", "linear", "__matmul__")
    plain = Typecheck.__torch_function__

    def crash(self: Any, func: Any, *rest: Any) -> Any:
        if getattr(func, "__name__", "") in wanted:
            raise error
        return plain(self, func, *rest)

    monkeypatch.setattr(Typecheck, "__torch_function__", crash)
    monkeypatch.setattr(Verify, "__torch_function__", crash)


def in_verify(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(
        sys.modules["placements.verification.crosscheck"], "first_lie", raising(error)
    )


PLACES = [at_entry, at_an_op]
ERRORS = [KeyError("tp"), AttributeError("gone"), RuntimeError("odd"), ValueError("odd")]


@typed
def doubled(
    x_TD: Annotated[Float[Tensor, "T D"], On(tp=S(0))],
) -> Annotated[Float[Tensor, "T D"], On(tp=S(0))]:
    return x_TD * 2


def whole(x_TD: Tensor) -> Tensor:
    return x_TD * 2


INPUTS: Any = {"x_TD": (torch.ones(4, 2).double(), {"tp": S(0)})}


@pytest.mark.parametrize("crash", PLACES)
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_the_kit_tells_a_crash(
    crash: Callable[..., None], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash(monkeypatch, error)
    with pytest.raises(CheckerCrash, match=DEFECT) as found:
        check_spmd_case(doubled, whole, INPUTS, mesh={"tp": 2})
    assert type(error).__name__ in str(found.value)
    assert found.value.cause is error
    with pytest.raises(CheckerCrash, match=DEFECT) as found:
        assert_spmd_equivalent(doubled, whole, examples=3)
    assert "check_spmd_case(fn, reference" in str(found.value)


def test_a_crash_of_one_rank_is_no_refusal_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = Typecheck.__torch_function__

    def crash(self: Any, func: Any, *rest: Any) -> Any:
        if getattr(func, "__name__", "") == "exp":
            if torch.distributed.get_rank() == 1:
                raise LookupError("no row")
            raise PlacementError("refused")
        return plain(self, func, *rest)

    monkeypatch.setattr(Typecheck, "__torch_function__", crash)
    with pytest.raises(CheckerCrash, match="LookupError: no row"):
        refusal(lambda x_TD: x_TD.exp(), torch.exp, INPUTS, mesh={"tp": 2})


def test_what_the_program_raises_by_itself_is_no_crash() -> None:
    def indexes(x_TD: Tensor) -> Tensor:
        rows = {"tp": x_TD}
        return rows["dp"]

    with pytest.raises(Exception, match="KeyError: 'dp'") as found:
        check_spmd_case(indexes, whole, INPUTS, mesh={"tp": 2})
    assert not isinstance(found.value, CheckerCrash)
    # What torch says of pieces that do not fit is a refusal.
    found = refusal(lambda x_TD: x_TD + torch.ones(9), whole, INPUTS, mesh={"tp": 2})
    assert "torch does not take these pieces" in str(found)


def test_ranks_may_say_different_things_by_themselves() -> None:
    def looks_up(x_TD: Tensor) -> Tensor:
        return {7: x_TD}[x_TD.shape[0]]

    ragged: Any = {"x_TD": (torch.ones(3, 2).double(), {"tp": S(0, Ragged(2, 1))})}
    with pytest.raises(RankFailure, match="KeyError: 2"):
        check_spmd_case(looks_up, whole, ragged, mesh={"tp": 2})
    # A constant of plain sizes is Replicate, so ranks refuse it for a reason of their own.
    found = refusal(lambda x_TD: x_TD + torch.ones(9, 2), whole, ragged, mesh={"tp": 2})
    assert "expected cut like the other operand" in str(found)


def test_what_the_program_raises_must_be_the_same_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raises(x_TD: Tensor) -> Tensor:
        raise ValueError(f"of the program, {(x_TD * 2).shape}")

    with pytest.raises(RankFailure, match="of the program"):
        check_spmd_case(raises, whole, INPUTS, mesh={"tp": 2})
    at_an_op(monkeypatch, ValueError("of the checker"))
    with pytest.raises(CheckerCrash, match="of the checker"):
        check_spmd_case(raises, whole, INPUTS, mesh={"tp": 2})


def test_an_object_in_the_message_makes_it_no_other_error() -> None:
    def raises(x_TD: Tensor) -> Tensor:
        raise LookupError(f"no {object()}")

    with pytest.raises(RankFailure, match="no <object object at"):
        check_spmd_case(raises, whole, INPUTS, mesh={"tp": 2})


def test_what_this_package_raises_about_its_own_numbers_is_a_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a `raise` statement, too: inference cut seven rows evenly over two ranks."""
    at_an_op(monkeypatch, ValueError())
    monkeypatch.setattr(Typecheck, "__torch_function__", lambda *args: Even(7, 2))
    with pytest.raises(CheckerCrash, match=r"ValueError: Even\(7\) does not divide"):
        check_spmd_case(doubled, whole, INPUTS, mesh={"tp": 2})


def declares(types: Any) -> Callable[[Tensor], Tensor]:
    return lambda x_TD: assert_type(torch.zeros(3), types)


def around(*args: Any, grads: Any = None) -> Callable[[Tensor], Tensor]:
    held: Any = {"tp": S(0)}
    opaque = region(lambda *xs: xs[0] * 2, ins=[held], outs=held, grads=grads or [held])
    return lambda x_TD: opaque(x_TD, *args)


class Layout:
    tokens: ClassVar[dict[str, Any]] = {"tp": 3}


@typed
def refers(x_TD: Annotated[Tensor, On("{layout.rows}")], layout: Layout) -> Tensor:
    return x_TD


@typed
def refers_to_a_number(
    x_TD: Annotated[Tensor, On("{layout.tokens}")], layout: Layout
) -> Tensor:
    return x_TD


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (declares({"tp": S(4)}), r"S\(4\) names a dim"),
        (declares({"tp": R, "pt": R}), "names axis 'pt'"),
        (declares({}), "no placement is declared for mesh axis 'tp'"),
        (declares({"tp": 3}), "a placement is R"),
        (declares({"tp": "Q"}), "'Q' is not a placement"),
        (declares(3), "a declaration maps axes to types"),
        (declares({"tp": S(0, Ragged(3, 3, 3))}), "is over 3 ranks, not over 2"),
        (declares({"tp": S(0, Ragged(1, 1))}), "dim 0 has 3 rows here"),
        (lambda x_TD: assert_type(x_TD * 1, {"tp": S(0)}, valid=x_TD), "valid= must be"),
        (around(1), "region: 1 types declared, 2 arguments"),
        (around(grads=[None]), "region: .* so ins and grads must say"),
        (around(grads=[{"pt": R}]), "region: grads names axis 'pt'"),
        (around(grads=[{"tp": 3}]), "a placement is R"),
        (lambda x_TD: refers(x_TD, Layout()), "Layout has no 'rows'"),
        (lambda x_TD: refers_to_a_number(x_TD, Layout()), "a placement is R"),
        (lambda x_TD: refers(x_TD), "missing 1 required positional argument"),
        (lambda x_TD: reinterpret_mesh(x_TD, "tp"), "a mesh is a DeviceMesh"),
    ],
)  # fmt: skip
def test_bad_arguments_that_only_a_checked_call_looks_at_are_no_crash(
    program: Any, said: str
) -> None:
    with pytest.raises(RankFailure, match=said):
        check_spmd_case(program, whole, INPUTS, mesh={"tp": 2})


def test_the_laws_tell_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    from placements.testing.laws.lockstep import check_lockstep
    from placements.testing.laws.short_programs import check_program
    from placements.testing.programs import Input, Program, Statement
    from placements.types.mesh import Mesh

    x = Input((2, 2), (("tp", R),))
    program = Program(Mesh({"tp": 2}), (x,), (Statement("x0 * 2"),))
    assert check_program(program) and check_lockstep(program) == []
    call = find(calls(name="neg"), lambda call: bool(is_kept(call)))
    placed = find(placed_calls(name="neg"), check_sound)
    padded = find(padded_calls(name="neg"), check_padding)
    at_an_op(monkeypatch, RuntimeError("odd"))
    with pytest.raises(CheckerCrash):
        check_program(program)
    with pytest.raises(CheckerCrash):
        check_lockstep(program)
    with monkeypatch.context() as patched:
        at_an_op(patched, ValueError("odd"), "neg", "__neg__", "negative", "neg_")
        for law in (lambda: is_kept(call), lambda: check_sound(placed)):
            with pytest.raises(CheckerCrash, match="ValueError: odd"):
                law()
        with pytest.raises(CheckerCrash, match="ValueError: odd"):
            check_padding(padded)
    at_entry(monkeypatch, ValueError("odd"))
    with pytest.raises(ValueError, match="odd"):
        check_loss("P")


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("crash", [*PLACES, in_verify])
def test_bugs_do_not_count_a_crash(
    crash: Callable[..., None], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash(monkeypatch, error)
    bug = next(b for b in BUGS if b.id == "B01")
    if crash is in_verify:  # the types refuse before; the right program gets there
        verdict = measure(bug)
        assert isinstance(verdict.right_failed, CheckerCrash) and not verdict.is_as(bug)
        return
    verdict = measure(bug)
    assert verdict.by == CRASHED and verdict.crash is not None
    assert not verdict.is_as(bug)


def test_the_command_bugs_fails_loudly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_entry(monkeypatch, KeyError("tp"))
    monkeypatch.setattr("spmd_moe.cli.bugs.BUGS", BUGS[:2])
    assert main(["bugs"]) == 3
    shown = " ".join(capsys.readouterr().out.split())
    assert "0 of 2 bugs are refused" in shown and "0 of 2 right programs pass" in shown
    assert f"FAILED: {BUGS[0].id}: KeyError: 'tp'" in shown and DEFECT in shown
    assert main(["bugs", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert all(DEFECT in one["crashed"] and not one["as_expected"] for one in found)
    assert main(["bugs", "--show", BUGS[0].id]) == 3
    shown = capsys.readouterr().out
    assert "not judged" in shown and "refused by" not in shown


def test_a_peer_that_crashes_has_no_opinion(monkeypatch: pytest.MonkeyPatch) -> None:
    bug = next(b for b in BUGS if b.id == "B01")
    at_entry(monkeypatch, AttributeError("gone"))
    assert opinion_of(SameWords(), bug).verdict == CRASHES
    (finding,) = find_all([bug])
    assert any("crashes 1" in line for line in summary([finding]))


OWN = "tests.support.own_modules.MLPWithReference"


@pytest.mark.parametrize("crash", PLACES)
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("command", [["--mesh", "tp=2,sp=off"], ["--module", OWN]])
def test_check_tells_a_crash(
    command: list[str],
    error: Exception,
    crash: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    crash(monkeypatch, error)
    assert main(["check", *command]) == 3
    err = capsys.readouterr().err
    assert DEFECT in err and type(error).__name__ in err and "Traceback" not in err
    assert main(["check", *command, "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert not report["passed"] and DEFECT in report["failure"]


@pytest.mark.parametrize("command", [["--mesh", "tp=2,sp=off"], ["--module", OWN]])
def test_check_tells_a_crash_of_verify(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_verify(monkeypatch, KeyError("tp"))
    assert main(["check", *command]) == 3
    assert DEFECT in capsys.readouterr().err


def test_a_lookup_that_fails_in_this_package_is_a_crash() -> None:

    def fails() -> None:
        infer.__dict__["no such name"]

    try:
        fails()
    except KeyError as error:
        with pytest.raises(CheckerCrash, match=r"test_crashes\.py"):
            check_judged(error, lambda: None)


@typed
def summed(
    x_T: Annotated[Float[Tensor, " T"], On(tp=P)],
) -> Annotated[Float[Tensor, " T"], On(tp=R)]:
    return all_reduce(x_T, "tp", src=P, dst=R)


def test_a_crash_in_backward_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "placements.testing.compare.case._seed", raising(KeyError("cotangent"))
    )
    inputs: Any = {"x_T": (torch.ones(4).double(), {"tp": P})}
    with pytest.raises(CheckerCrash, match="KeyError: 'cotangent'"):
        check_spmd_case(summed, lambda x_T: x_T, inputs, mesh={"tp": 2})


LAYER, MODULE = ("check", "--mesh", "tp=2,sp=off"), ("check", "--module", OWN)
MESHES, SHOW = ("check", "--compare-meshes", "--ranks", "2"), ("bugs", "--show", "B01")


@pytest.mark.parametrize(
    ("part", "command"),
    [
        *(("checking", command) for command in (LAYER, MODULE, MESHES, ("bugs",), SHOW)),
        *(("simulating", command) for command in (LAYER, MODULE, ("bugs",), SHOW)),
        *(("modules", command) for command in (LAYER, MESHES)),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:2]),
)
@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_a_torch_that_is_not_supported_is_one_line(
    part: str,
    command: tuple[str, ...],
    options: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gone = probes.Use("torch.gone", "do things", lambda: False)
    monkeypatch.setitem(probes.PARTS, part, (gone,))
    monkeypatch.setattr(probes, "_works", set())
    monkeypatch.setattr("spmd_moe.cli.bugs.BUGS", BUGS[:2])
    code = main([*command, *options])
    shown = capsys.readouterr()
    assert code == 2 and not shown.out, shown
    assert shown.err.startswith(f"spmd-moe {command[0]}: torch {torch.__version__} is not")
    assert shown.err.count("\n") == 1 and "torch.gone (to do things)" in shown.err
    assert DEFECT not in shown.err
