"""flex_attention inside a block: what its functions do with numbers of rows decides."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    create_block_mask,
    flex_attention,
)

from placements import (
    PlacementError,
    R,
    S,
    V,
    assert_type,
    join,
    set_current_mesh,
    split,
    type_of,
    typecheck,
)
from placements.testing import device_mesh, run_ranks
from placements.types.axis import AxisType

LENGTH = 6
Inputs = dict[str, Tensor]


def _inputs() -> Inputs:
    draw = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=draw, dtype=torch.float64)

    return {
        "q": normal(4, 4, LENGTH, 8),
        "k": normal(4, 2, LENGTH, 8),
        "v": normal(4, 2, LENGTH, 8),
        "slopes": normal(4),
        "documents": torch.randint(0, 2, (4, LENGTH), generator=draw),
    }


def _masked(x: Inputs, mask: Any, batch: Any = None, **options: Any) -> Any:
    lengths = x["q"].shape[2], x["k"].shape[2]
    blocks = create_block_mask(mask, batch, None, *lengths, device="cpu")
    return flex_attention(
        x["q"], x["k"], x["v"], block_mask=blocks, enable_gqa=True, **options
    )


def _scored(x: Inputs, score: Any) -> Any:
    return flex_attention(x["q"], x["k"], x["v"], score_mod=score, enable_gqa=True)


def plain(x: Inputs) -> Any:
    return _scored(x, None)


def scaled(x: Inputs) -> Any:
    return flex_attention(x["q"], x["k"], x["v"], scale=0.5, enable_gqa=True)


def causal(x: Inputs) -> Any:
    return _masked(x, lambda b, h, q, k: q >= k)


def sums(x: Inputs) -> Any:
    aux = AuxRequest(lse=True)  # torch does not return the largest scores on a CPU
    return _masked(x, lambda b, h, q, k: q >= k, return_aux=aux)[1].lse


def blind_queries(x: Inputs) -> Any:
    return _masked(x, lambda b, h, q, k: q > k)


def slope_of_each_head(x: Inputs) -> Any:
    return _scored(x, lambda s, b, h, q, k: s + x["slopes"][h] * (q - k))


def documents(x: Inputs) -> Any:
    ids = x["documents"]
    return _masked(x, lambda b, h, q, k: ids[b, q] == ids[b, k], x["q"].shape[0])


def number_in_the_batch(x: Inputs) -> Any:
    return _scored(x, lambda s, b, h, q, k: s * (b + 1))


def number_of_the_head(x: Inputs) -> Any:
    return _scored(x, lambda s, b, h, q, k: s * (h + 1))


PROGRAMS: list[Callable[[Inputs], Any]] = [
    plain, scaled, causal, sums, blind_queries, slope_of_each_head, documents,
    number_in_the_batch, number_of_the_head,
]  # fmt: skip

# How the inputs are cut -> the programs that then mean what one device computes. The
# others number rows that a rank counts from 0 in its own piece.
CUTS: dict[str, tuple[dict[str, AxisType], set[str]]] = {
    "batch": (
        {"q": S(0), "k": S(0), "v": S(0), "slopes": R, "documents": S(0)},
        {p.__name__ for p in PROGRAMS} - {"number_in_the_batch"},
    ),
    "heads": (
        {"q": S(1), "k": S(1), "v": S(1), "slopes": S(0), "documents": R},
        {p.__name__ for p in PROGRAMS} - {"number_of_the_head"},
    ),
    "heads with all slopes": (
        {"q": S(1), "k": S(1), "v": S(1), "slopes": R, "documents": R},
        {p.__name__ for p in PROGRAMS} - {"number_of_the_head", "slope_of_each_head"},
    ),
    "queries": (
        {"q": S(2), "k": R, "v": R, "slopes": R, "documents": R},
        {"plain", "scaled", "number_in_the_batch", "number_of_the_head"},
    ),
    "nothing": (
        {"q": R, "k": R, "v": R, "slopes": R, "documents": R},
        {p.__name__ for p in PROGRAMS},
    ),
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.parametrize("cut", CUTS)
def test_true_or_not_accepted_as_a_piece(cut: str, program: Any) -> None:
    types, right = CUTS[cut]
    whole = _inputs()

    def on_rank(pieces: Inputs) -> tuple[Any, Tensor] | str:
        with set_current_mesh(device_mesh()), typecheck():
            x = {n: assert_type(p.clone(), {"a": types[n]}) for n, p in pieces.items()}
            try:
                result = program(x)
            except PlacementError as error:
                return str(error)
            return type_of(result)["a"], result.detach().clone()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow without torch.compile
        expected = program(whole)
        cuts = {n: split(x, {"a": types[n]}, {"a": 2}) for n, x in whole.items()}
        per_rank = [{n: pieces[r] for n, pieces in cuts.items()} for r in range(2)]
        results = run_ranks({"a": 2}, lambda: on_rank(per_rank[_rank()]))
    if program.__name__ in right:
        assert not isinstance(results[0], str), results[0]
        found = [type_and_value[0] for type_and_value in results]
        assert found[0].letter == types["q"].letter, found
        values = [type_and_value[1] for type_and_value in results]
        joined = join(values, {"a": found[0]}, {"a": 2})
        torch.testing.assert_close(joined, expected, rtol=1e-12, atol=1e-12)
    else:  # refused, or each rank's own
        assert isinstance(results[0], str) or results[0][0] == V, results[0]


def _rank() -> int:
    return torch.distributed.get_rank()


def test_a_tensor_that_a_function_reads_needs_a_type() -> None:
    bias = torch.zeros(LENGTH)
    with set_current_mesh({"a": 2}), typecheck(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = {n: assert_type(t, {"a": R}) for n, t in _inputs().items()}
        with pytest.raises(PlacementError, match="bias has no placement"):
            _scored(x, lambda s, b, h, q, k: s + bias[k])
