"""Recurrent layers and cells: what is accepted is what one device computes."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from placements import (
    Mesh,
    P,
    PlacementError,
    R,
    S,
    V,
    assert_type,
    axis_rank,
    declare,
    join,
    set_current_mesh,
    shared_generator,
    type_of,
    typecheck,
)

RANKS, STEPS, INS, HIDDEN = 2, 3, 5, 4

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN": nn.RNN,
    "RNN of relu": lambda *sizes, **more: nn.RNN(*sizes, nonlinearity="relu", **more),
    "LSTM that projects": lambda *sizes, **more: nn.LSTM(*sizes, proj_size=2, **more),
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "two layers, both ways": {"num_layers": 2, "bidirectional": True},
    "both, batch first": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "no biases": {"bias": False},
}


def layer_of(name: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[name](INS, HIDDEN, **more).double()


def states_of(layer: Any, samples: int) -> Any:
    """Hidden states that are not zeros, as the layer takes them."""
    many = layer.num_layers * (1 + layer.bidirectional)
    out = layer.proj_size or layer.hidden_size
    hidden = torch.randn(many, samples, out, dtype=torch.float64)
    if not isinstance(layer, nn.LSTM):
        return [hidden]
    return [hidden, torch.randn(many, samples, layer.hidden_size, dtype=torch.float64)]


def run(layer: Any, x: Tensor, states: list[Tensor]) -> list[Tensor]:
    """Return the steps and the last states."""
    given = (x,) if not states else (x, states[0] if len(states) == 1 else tuple(states))
    steps, last = layer(*given)
    return [steps, *(last if isinstance(last, tuple) else (last,))]


def weighed(results: list[Tensor]) -> Tensor:
    return sum((r * (k + 1)).square().sum() for k, r in enumerate(results))  # pyright: ignore


@pytest.mark.parametrize("has_states", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_on_pieces_is_that_of_one_device(
    name: str, kind: str, has_states: bool
) -> None:
    layer = layer_of(name, **KINDS[kind])
    batch = 0 if layer.batch_first else 1
    sizes = (4, STEPS, INS) if batch == 0 else (STEPS, 4, INS)
    x = torch.randn(*sizes, dtype=torch.float64)
    states = states_of(layer, 4) if has_states else []
    one = deepcopy(layer)
    wanted = run(one, x, states)
    weighed(wanted).backward()
    found: list[list[Tensor]] = []
    gradients: list[list[Tensor]] = []
    for rank in range(RANKS):
        mine = deepcopy(layer)
        declare(mine, {"*": {"dp": R}})
        piece = x.chunk(RANKS, batch)[rank].clone()
        own = [s.chunk(RANKS, 1)[rank].clone() for s in states]
        with set_current_mesh(Mesh({"dp": RANKS}, {"dp": rank})), typecheck():
            assert_type(piece, {"dp": S(batch)})
            for state in own:
                assert_type(state, {"dp": S(1)})
            results = run(mine, piece, own)
            dims = [batch, *(1 for _ in results[1:])]
            assert [type_of(r) for r in results] == [{"dp": S(d)} for d in dims]
            loss = weighed(results)
            assert type_of(loss) == {"dp": P}
            loss.backward()
        found.append([r.detach() for r in results])
        gradients.append([w.grad for w in mine.parameters() if w.grad is not None])
    for k, one_result in enumerate(wanted):
        pieces = [results[k] for results in found]
        cut = {"dp": S(batch if k == 0 else 1)}
        assert torch.allclose(join(pieces, cut, {"dp": RANKS}), one_result)
    for k, w in enumerate(one.parameters()):
        assert w.grad is not None
        assert torch.allclose(gradients[0][k] + gradients[1][k], w.grad)


CELLS: dict[str, Callable[..., nn.Module]] = {
    "LSTMCell": nn.LSTMCell,
    "GRUCell": nn.GRUCell,
    "RNNCell": nn.RNNCell,
    "RNNCell of relu": lambda *sizes, **more: nn.RNNCell(
        *sizes, nonlinearity="relu", **more
    ),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_on_pieces_is_that_of_one_device(name: str, bias: bool) -> None:
    torch.manual_seed(0)
    cell = CELLS[name](INS, HIDDEN, bias=bias).double()
    x, h, c = (torch.randn(4, n, dtype=torch.float64) for n in (INS, HIDDEN, HIDDEN))

    def steps(cell: nn.Module, x: Tensor, h: Tensor, c: Tensor) -> list[Tensor]:
        results = cell(x, (h, c)) if name == "LSTMCell" else cell(x, h)
        return list(results) if isinstance(results, tuple) else [results]

    wanted = steps(cell, x, h, c)
    found: list[list[Tensor]] = []
    for rank in range(RANKS):
        mine = deepcopy(cell)
        declare(mine, {"*": {"dp": R}})
        given = [t.chunk(RANKS)[rank].clone() for t in (x, h, c)]
        with set_current_mesh(Mesh({"dp": RANKS}, {"dp": rank})), typecheck():
            for t in given:
                assert_type(t, {"dp": S(0)})
            found.append(steps(mine, *given))
            assert all(type_of(r) == {"dp": S(0)} for r in found[-1])
    for k, one in enumerate(wanted):
        assert torch.allclose(torch.cat([results[k] for results in found]), one)


def typed(x: Tensor, kind: Any) -> Tensor:
    return assert_type(x, {"dp": kind})


def test_steps_features_and_weights_must_be_whole() -> None:
    layer = layer_of("LSTM")
    declare(layer, {"*": {"dp": R}})
    with set_current_mesh({"dp": 2}), typecheck():
        for kind in (S(0), S(2)):
            x = typed(torch.randn(STEPS, 4, INS, dtype=torch.float64), kind)
            hx = [typed(h, R) for h in states_of(layer, 4)]
            with pytest.raises(PlacementError, match=r"step before it|all features"):
                layer(x, tuple(hx))


def test_dropout_between_layers_is_a_draw() -> None:
    layer = layer_of("LSTM", num_layers=2, dropout=0.5)
    declare(layer, {"*": {"dp": R}})
    with set_current_mesh({"dp": 2}), typecheck():
        x = typed(torch.randn(STEPS, 4, INS, dtype=torch.float64), R)
        assert type_of(layer(x)[0]) == {"dp": V}
        assert type_of(layer.eval()(x)[0]) == {"dp": R}


def test_a_packed_sequence_is_each_ranks_own_or_whole() -> None:
    layer = layer_of("GRU")
    declare(layer, {"*": {"dp": R}})
    torch.manual_seed(1)
    x = torch.randn(STEPS, 2, INS, dtype=torch.float64)
    packed = pack_padded_sequence(x, torch.tensor([3, 2]))
    hx = torch.zeros(1, 2, HIDDEN, dtype=torch.float64)
    weights: Any = layer._flat_weights
    with set_current_mesh({"dp": 2}), typecheck():
        for kind in (R, V):
            data = typed(packed.data.clone(), kind)
            sizes = typed(packed.batch_sizes.clone(), kind)
            given = (data, sizes, typed(hx.clone(), kind), weights)
            layer(typed(x.clone(), R))  # its weights have their types now
            steps, last = torch.gru(*given, True, 1, 0.0, False, False)
            assert type_of(steps) == type_of(last) == {"dp": kind}
        cut = typed(packed.data.clone(), S(0))
        sizes = typed(packed.batch_sizes.clone(), R)
        with pytest.raises(PlacementError, match="packed"):
            torch.gru(cut, sizes, typed(hx.clone(), R), weights, True, 1, 0.0, False, False)


# Settings of `torch.lstm(x, hx, params, ...)`, after its tensors.
SETTINGS = {
    "has_biases": True, "num_layers": 2, "dropout": 0.5, "train": True,
    "bidirectional": False, "batch_first": False,
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True], ids=["steps", "packed"])
@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_a_setting_is_that_of_all_ranks(name: str, packed: bool) -> None:
    """One rank would drop other states than the others, though all draw the same numbers."""
    settings = {k: v for k, v in SETTINGS.items() if not packed or k != "batch_first"}
    kinds = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN of relu"}
    layer: Any = layer_of(kinds[name], num_layers=2)
    declare(layer, {"*": {"dp": R}})
    function = getattr(torch, name)
    x = torch.randn(STEPS, 4, INS, dtype=torch.float64)
    whole = pack_padded_sequence(x, torch.tensor([3, 3, 2, 2]))
    with set_current_mesh({"dp": 2}), typecheck(), shared_generator("dp"):
        layer(typed(x.clone(), R))  # its weights have their types now
        hx = [typed(h, R) for h in states_of(layer, 4)]
        state = hx if name == "lstm" else hx[0]
        if packed:
            rows, sizes = typed(whole.data, R), typed(whole.batch_sizes, R)
            operands = (rows, sizes, state, layer._flat_weights)
        else:
            operands = (typed(x, R), state, layer._flat_weights)
        assert type_of(function(*operands, *settings.values())[0]) == {"dp": R}
        for setting in ("num_layers", "dropout"):
            own = {**settings, setting: axis_rank("dp") * 0 + settings[setting]}
            with pytest.raises(PlacementError, match="same on all ranks"):
                function(*operands, *own.values())


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh"])
def test_states_are_dropped_alike_only_if_draws_are_shared(name: str) -> None:
    """One call after the other, so that what was inferred of the first is remembered."""
    layer: Any = layer_of({"lstm": "LSTM", "gru": "GRU"}.get(name, "RNN"), num_layers=2)
    layer.dropout = 0.5
    declare(layer, {"*": {"dp": R}})
    with set_current_mesh({"dp": 2}), typecheck():
        x = typed(torch.randn(STEPS, 4, INS, dtype=torch.float64), R)
        for _ in range(2):
            with shared_generator("dp"):
                assert type_of(layer(x)[0]) == {"dp": R}
            assert type_of(layer(x)[0]) == {"dp": V}


def test_shapes_that_do_not_fit_are_refused_before_torch_runs() -> None:
    layer: Any = layer_of("LSTM")
    declare(layer, {"*": {"dp": R}})
    with set_current_mesh({"dp": 2}), typecheck():
        x = typed(torch.randn(STEPS, 4, INS, dtype=torch.float64), S(1))
        h, c = (
            typed(torch.zeros(1, 4, HIDDEN, dtype=torch.float64), S(1)) for _ in range(2)
        )
        layer(x, (h, c))
        weights = layer._flat_weights
        odd: list[tuple[Any, ...]] = [
            (x, [h], weights), (x, [h, c], weights[:3]), (x, [h, c], weights[::-1]),
            (x[..., :3], [h, c], weights), (x[:, :, 0], [h, c], weights),
        ]  # fmt: skip
        for given in odd:
            with pytest.raises(PlacementError, match="do not fit together"):
                torch.lstm(*given, True, 1, 0.0, False, False, False)
