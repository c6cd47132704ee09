"""Flows of recurrent layers and cells: each sample by itself, step after step.

Their kernels do not look at every shape that they are given, so a call whose shapes do not
fit together is refused here, before torch reads memory that is not there.
"""

from collections.abc import Sequence
from typing import Any

from placements.inference.combine import combine
from placements.inference.flows.products import inner_value
from placements.inference.flows.random import masked
from placements.inference.op import Op
from placements.inference.terms import Label, Mixed, Operand, Refusal, Term
from placements.types.tensor import TensorType

STEPS = "every step needs the step before it, which another rank holds"
FEATURES = "every gate needs all features, and this rank holds a piece of them"
LAYERS = "the layers run one after the other, and this rank holds the states of some"
PACKED = "which rows of a packed sequence belong together only the whole knows"


def sequence(
    op: Op,
    hx: Any,
    params: Sequence[Operand],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
    input: Operand | None = None,
    data: Operand | None = None,
    batch_sizes: Operand | None = None,
    *,
    shared: frozenset[str],
    gates: int,
    num_states: int,
) -> tuple[TensorType, ...]:
    """lstm, gru, rnn_tanh, rnn_relu: the steps of all samples, and the last states.

    Of a packed sequence (`data`, `batch_sizes`) no dim may be cut. Of two states (h, c)
    the first may be projected, by one more weight.
    """
    states: list[Operand] = [hx] if isinstance(hx, Operand) else list(hx)
    many = num_layers * (1 + bidirectional)
    batch = 0 if batch_first else 1
    if input is not None:
        _check(input.ndim == 3, input, "three dims: steps, samples, features")
        rows: list[Label] = [Mixed(STEPS)] * 3
        rows[batch], rows[2] = batch, Mixed(FEATURES)
        terms = [Term(input, tuple(rows))]
        samples = input.shape[batch]
    else:
        assert data is not None and batch_sizes is not None
        _check(data.ndim == 2, data, "two dims: rows, features")
        terms = [Term(data, (Mixed(PACKED), Mixed(FEATURES)))]
        terms.append(Term(batch_sizes, (Mixed(PACKED),) * batch_sizes.ndim, True))
        samples = None
    width = (input or data or states[0]).shape[-1]
    each = 2 + 2 * has_biases
    projects = num_states == 2 and len(params) == many * (each + 1)
    outs = _check_weights(gates, params, many, bidirectional, has_biases, width, projects)
    _check(len(states) == num_states, states[0], "its states")
    for state, features in zip(states, outs, strict=False):
        fits = state.ndim == 3 and (state.shape[0], state.shape[2]) == (many, features)
        fits = fits and samples in (None, state.shape[1])
        _check(fits, state, f"{many} x samples x {features}")
    weights = [Term(w, (Mixed(FEATURES),) * w.ndim) for w in params]

    def made(place: int) -> TensorType:
        """The type of a result with three dims, whose samples are in that one."""
        own: Label = place if input is not None else Mixed(PACKED)
        kept = [Term(s, (Mixed(LAYERS), own, Mixed(FEATURES))) for s in states]
        first = Term(
            terms[0].operand,
            tuple(place if isinstance(d, int) else d for d in terms[0].labels),
        )
        found = combine(op.linearity, [first, *terms[1:], *kept, *weights])
        if not (dropout and train and num_layers > 1):
            return found
        return masked(inner_value(found, (1, 1, 1), terms[0].operand), shared)

    return (made(batch), *(made(1) for _ in states))


def cell(
    op: Op,
    input: Operand,
    hx: Any,
    w_ih: Operand,
    w_hh: Operand,
    b_ih: Any = None,
    b_hh: Any = None,
    *,
    gates: int,
    num_states: int,
) -> Any:
    """lstm_cell, gru_cell, rnn_tanh_cell, rnn_relu_cell: one step of all samples."""
    states: list[Operand] = [hx] if isinstance(hx, Operand) else list(hx)
    biases = [b for b in (b_ih, b_hh) if isinstance(b, Operand)]
    _check(input.ndim == 2, input, "two dims: samples, features")
    _check(len(biases) != 1, input, "both biases, or none")
    params = [w_ih, w_hh, *biases]
    outs = _check_weights(gates, params, 1, False, bool(biases), input.shape[1])
    _check(len(states) == num_states, states[0], "its states")
    for state, features in zip(states, outs, strict=False):
        fits = state.shape == (input.shape[0], features)
        _check(fits, state, f"{input.shape[0]} x {features}")
    terms = [Term(x, (0, Mixed(FEATURES))) for x in (input, *states)]
    terms += [Term(w, (Mixed(FEATURES),) * w.ndim) for w in params]
    found = combine(op.linearity, terms)
    return found if isinstance(hx, Operand) else (found, found)


def _check(fits: bool, operand: Operand, wanted: str) -> None:
    if not fits:
        raise Refusal("the shapes do not fit together", operand=operand, expected=wanted)


def _check_weights(
    gates: int,
    params: Sequence[Operand],
    many: int,
    bidirectional: bool,
    has_biases: bool,
    width: int,
    projects: bool = False,
) -> tuple[int, int]:
    """Check the shapes of all weights; how many features the states have (h, c)."""
    each = 2 + 2 * has_biases + projects
    _check(many > 0 and len(params) == many * each, params[0], f"{many * each} weights")
    _check(all(w.ndim for w in params) and params[1].ndim == 2, params[1], "matrices")
    out = params[1].shape[1]
    hidden = params[1].shape[0] // gates
    directions = 2 if bidirectional else 1
    for k in range(many):
        of_layer = params[k * each : (k + 1) * each]
        ins = width if k < directions else out * directions
        wanted = [(gates * hidden, ins), (gates * hidden, out)]
        wanted += [(gates * hidden,)] * (2 * has_biases) + [(out, hidden)] * projects
        for w, shape in zip(of_layer, wanted, strict=True):
            _check(w.shape == shape, w, " x ".join(map(str, shape)))
    _check(projects or out == hidden, params[1], f"{gates} x {out} rows")
    return out, hidden
