"""Nothing that counts depends on rows of padding: the law, over every op of the table."""

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from placements.annotations.declarations import type_of
from placements.checker.lookup import KNOWN
from placements.checker.mode import typecheck
from placements.inference.flows.elementwise import pointwise
from placements.inference.ops import OPS
from placements.runtime.mesh import set_current_mesh
from placements.runtime.tags import put
from placements.testing.cases import call_names
from placements.testing.laws.padding_ignored import (
    ALONE,
    PaddedCall,
    check_padding,
    padded_calls,
)
from placements.types.padding import Pads, Validity
from placements.types.tensor import TensorType

# Without tensors among their arguments, or with rows that they all look along.
NEVER = frozenset(
    "zeros ones full arange linspace eye rand randn randint randperm histc "
    "fill_diagonal".split()
)
# Many operands must be padded alike, or not at all: few draws are.
SELDOM = frozenset(
    "mode min norm cross_entropy scatter index_add index_copy index_fill index_put lstm gru "
    "rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split()
)

SHARE = 100


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n for n in call_names() if "empty" not in n])
def test_nothing_that_counts_depends_on_padding(name: str) -> None:
    accepted: list[PaddedCall] = []

    def law(padded: PaddedCall) -> None:
        if check_padding(padded) and any(padded.pads):
            accepted.append(padded)

    count = max(settings().max_examples // SHARE, 15)
    plain = name if name.endswith("__") else name.removesuffix("_")
    is_rare = plain in NEVER | SELDOM
    for examples in (count, 5 * count) if is_rare else (count, 5 * count, 25 * count):
        settings(max_examples=examples)(given(padded_calls(name=name))(law))()
        if accepted:
            break
    assert accepted or is_rare
    assert not accepted or plain not in NEVER


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n for n, op in OPS.items() if op.flow is pointwise])
def test_what_an_op_makes_of_a_false_row_of_padding(name: str) -> None:
    """Drawn operands are numbers, of which zeros stay zeros; False may become True."""
    function = getattr(torch.Tensor, name, None) or getattr(torch, name, None)
    bools = torch.tensor([True, False, False])
    for others in ((), (bools.flip(0),)):
        with set_current_mesh(ALONE), typecheck():
            x = bools.clone()
            put(x, TensorType(ALONE, (), pads=(Pads(Validity.of_first(1), (0,), 0),)))
            try:
                y = function(x, *others)
            except Exception:  # not of bools, or not of so many operands
                continue
            known = type_of(y) if isinstance(y, Tensor) else None
        for one in known.pads if known is not None else ():
            if one.holds is not None:
                assert y[1:].eq(one.holds).all(), (name, y, known)


@pytest.mark.filterwarnings("ignore")
def test_the_law_finds_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that makes something of zero, called linear, must not pass."""
    monkeypatch.setitem(OPS, "exp", OPS["neg"])
    KNOWN.clear()

    @settings(max_examples=200, database=None)
    @given(padded_calls(name="exp"))
    def law(padded: PaddedCall) -> None:
        check_padding(padded)

    try:
        with pytest.raises(AssertionError, match="exp"):
            law()
    finally:
        KNOWN.clear()
