"""Functions of torch in Python that are made of ops: each op in them is judged."""

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor, nn

from placements import (
    On,
    P,
    PlacementError,
    R,
    S,
    V,
    assert_type,
    axis_rank,
    set_current_mesh,
    shared_generator,
    type_of,
    typecheck,
    typed,
)
from placements.runtime.state import suspended
from placements.testing import assert_spmd_equivalent


@pytest.fixture
def checked() -> Iterator[None]:
    with set_current_mesh({"dp": 2}), typecheck():
        yield


def attention(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    steps_first = x.transpose(0, 1)
    found, _ = F.multi_head_attention_forward(
        steps_first, steps_first, steps_first, 4, 2, w_in, None, None, None, False, 0.0,
        w_out, None, need_weights=False,
    )  # fmt: skip
    return found.transpose(0, 1)


def test_attention_equals_one_device() -> None:
    @typed
    def on_ranks(
        x: Annotated[Float[Tensor, "B T 4"], On(dp=S(0))],
        w_in: Annotated[Float[Tensor, "12 4"], On(dp=R)],
        w_out: Annotated[Float[Tensor, "4 4"], On(dp=R)],
    ) -> Annotated[Float[Tensor, "B T 4"], On(dp=S(0))]:
        return attention(x, w_in, w_out)

    assert_spmd_equivalent(on_ranks, attention, sizes={"B": (2, 4), "T": 3}, examples=20)


@pytest.mark.usefixtures("checked")
class TestInABlock:
    def test_a_module_of_attention_is_cut_by_batch(self) -> None:
        attend = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        for parameter in attend.parameters():
            assert_type(parameter, {"dp": R})
        x = assert_type(torch.randn(4, 5, 8), {"dp": S(0)})
        for training in (True, False):
            found, weights = attend.train(training)(x, x, x)
            assert type_of(found) == type_of(weights) == {"dp": S(0)}

    def test_an_op_inside_is_refused(self) -> None:
        partial = assert_type(torch.randn(4, 3), {"dp": P})
        with pytest.raises(PlacementError, match="add at test_composed"):
            F.gumbel_softmax(partial)

    def test_pieces_that_the_function_does_not_take_are_named(self) -> None:
        x = assert_type(torch.randn(2, 3), {"dp": S(0)})
        with pytest.raises(
            PlacementError, match=r"gaussian_nll_loss at test_composed.*pieces"
        ):
            F.gaussian_nll_loss(x, x, torch.ones(4, 3))

    def test_what_no_piece_is_guilty_of_is_torchs_own_error(self) -> None:
        x = assert_type(torch.randn(2, 3), {"dp": R})
        with pytest.raises(ValueError, match="var is of incorrect size") as caught:
            F.gaussian_nll_loss(x, x, torch.ones(5, 3))
        assert not isinstance(caught.value, PlacementError)

    @pytest.mark.parametrize("fill", [nn.init.constant_, nn.init.normal_, nn.init.uniform_])
    def test_a_refused_initialiser_changes_nothing(self, fill: Any) -> None:
        values = torch.randn(2, 2)
        before = values.numpy().copy()
        w = assert_type(values, {"dp": P})
        arguments = (3.0,) if fill is nn.init.constant_ else ()
        with pytest.raises(PlacementError):
            fill(w, *arguments)
        with suspended():
            assert (values.numpy() == before).all()

    def test_initialisers_fill_typed_tensors(self) -> None:
        w = assert_type(torch.randn(4, 4), {"dp": R})
        nn.init.constant_(w, 0.5)
        nn.init.zeros_(w)
        assert type_of(w) == {"dp": R}
        with shared_generator("dp"):
            nn.init.kaiming_uniform_(w)
            nn.init.xavier_uniform_(w)
            nn.init.trunc_normal_(w)
        assert type_of(w) == {"dp": R}
        own = assert_type(torch.randn(4, 4), {"dp": V})
        nn.init.normal_(own)
        assert type_of(own) == {"dp": V}

    @pytest.mark.parametrize("call", [
        lambda x: F.gumbel_softmax(x, hard=axis_rank("dp")),
        lambda x: F.gaussian_nll_loss(x, x, x.exp(), axis_rank("dp")),
        lambda x: F.dropout1d(x, 0.0, inplace=axis_rank("dp")),
        lambda x: F.multilabel_soft_margin_loss(x, x, reduce=axis_rank("dp")),
    ])  # fmt: skip
    def test_a_rank_is_no_flag(self, call: Any) -> None:
        x = assert_type(torch.ones(2, 3), {"dp": R})
        with pytest.raises(PlacementError, match="is a flag, expected True or False"):
            call(x)
