"""Flows of products: matmul and its kin, einsum, grouped matmul, attention."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from placements.inference.combine import combine
from placements.inference.flows.broadcast import broadcast, terms_of
from placements.inference.flows.random import masked
from placements.inference.flows.reshape import repeat_interleave
from placements.inference.op import Op
from placements.inference.rules import LINEAR, MULTILINEAR
from placements.inference.terms import (
    NO_ARGUMENT,
    Contract,
    Label,
    Mixed,
    Operand,
    Refusal,
    Scattered,
    Term,
)
from placements.types.tensor import TensorType


def _product(op: Op, terms: Sequence[Term]) -> TensorType:
    return combine(op.linearity, terms)


def inner_value(found: TensorType, shape: tuple[int, ...], made_of: Operand) -> Operand:
    """A value inside an op; errors name the operand that it was made of."""
    return Operand(found, shape, made_of.dtype, made_of.position)


def plus(
    product: TensorType, shape: tuple[int, ...], bias: Any, scaled_by: Any = 1
) -> TensorType:
    """The type of product + bias, which is a sum like any other."""
    if not isinstance(bias, Operand) or scaled_by == 0:
        return product
    result = Operand(product, shape, bias.dtype, NO_ARGUMENT)
    return combine(LINEAR, terms_of([result, bias]))


def matmul(op: Op, input: Operand, other: Operand) -> TensorType:
    """mm, bmm, mv, dot, matmul: the last dim against the last but one."""
    if input.ndim == 0 or other.ndim == 0:
        raise Refusal("matmul takes tensors of at least one dim", operand=input)
    lead = max(input.ndim, other.ndim, 2) - 2
    batches = [o for o in (input, other) if o.ndim > 2]
    prefixes: dict[int, tuple[Label, ...]] = {}
    if batches:
        heads = [replace(o, shape=o.shape[:-2]) for o in batches]
        for operand, labels in zip(batches, broadcast(heads), strict=True):
            shift = lead - max(h.ndim for h in heads)
            prefixes[id(operand)] = tuple(
                label + shift if isinstance(label, int) else label for label in labels
            )
    contract = Contract("inner")
    row, column = lead, lead + (input.ndim > 1)
    left: tuple[Label, ...] = (contract,) if input.ndim == 1 else (row, contract)
    right: tuple[Label, ...] = (contract,) if other.ndim == 1 else (contract, column)
    return _product(
        op,
        [
            Term(input, (*prefixes.get(id(input), ()), *left)),
            Term(other, (*prefixes.get(id(other), ()), *right)),
        ],
    )


def matmul_reversed(op: Op, input: Operand, other: Operand) -> TensorType:
    """x.__rmatmul__(y) is y @ x."""
    return matmul(op, other, input)


def inner(op: Op, input: Operand, other: Operand) -> TensorType:
    """The last dims are contracted; the dims before them stand side by side."""
    if input.ndim == 0 or other.ndim == 0:
        return _product(op, terms_of([input, other]))
    contract, lead = Contract("inner"), input.ndim - 1
    right = range(lead, lead + other.ndim - 1)
    return _product(
        op, [Term(input, (*range(lead), contract)), Term(other, (*right, contract))]
    )


def outer(op: Op, input: Operand, vec2: Operand) -> TensorType:
    return _product(op, [Term(input, (0,)), Term(vec2, (1,))])


def linear(
    op: Op, input: Operand, weight: Operand, bias: Operand | None = None
) -> TensorType:
    """input (..., K) with weight (N, K); a bias is added to the result."""
    last = len(input.shape) - 1
    if bias is not None and bias.ndim > last + weight.ndim - 1:
        raise Refusal(
            "a bias with more dims than the product: torch drops some of them; add it to "
            "the result of linear instead",
            operand=bias,
            expected="a bias of one dim",
        )
    labels: tuple[Label, ...] = tuple(range(last))
    product = _product(
        op,
        [
            Term(input, (*labels, Contract("inner"))),
            Term(weight, (last, Contract("inner"))[2 - len(weight.shape) :]),
        ],
    )
    return plus(product, (*input.shape[:-1], *weight.shape[:-1]), bias)


def add_product(
    op: Op, input: Operand, left: Operand, right: Operand, beta: Any = 1, alpha: Any = 1
) -> TensorType:
    """addmm, baddbmm, addmv: input + left @ right."""
    columns = right.shape[-1:] if right.ndim > 1 else ()
    return plus(matmul(op, left, right), (*left.shape[:-1], *columns), input, beta)


def einsum(op: Op, args: tuple[Any, ...]) -> TensorType:
    """Letters kept in the result keep their dim; letters left out are summed."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(cast(Any, operands[0]))
    if not isinstance(equation, str):
        raise Refusal("einsum is known in its equation form only: einsum('ij,jk', x, y)")
    left, arrow, right = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    dots = [
        o.ndim - len(i.replace("...", "")) for i, o in zip(inputs, operands, strict=True)
    ]
    width = max((d for i, d in zip(inputs, dots, strict=True) if "..." in i), default=0)
    if not arrow:
        seen = left.replace("...", "").replace(",", "")
        right = "..." * ("..." in left) + "".join(
            sorted(c for c in set(seen) if seen.count(c) == 1)
        )
    result = _letters(right, width, width)
    terms: list[Term] = []
    for text, operand, own in zip(inputs, operands, dots, strict=True):
        letters = _letters(text, own, width)
        labels: list[Label] = []
        for dim, letter in enumerate(letters):
            if letters.count(letter) > 1:
                labels.append(Mixed("a letter that stands twice takes a diagonal"))
            elif letter not in result:
                labels.append(Contract(letter))
            elif operand.is_one_row(dim):
                labels.append(None)
            else:
                labels.append(result.index(letter))
        terms.append(Term(operand, tuple(labels)))
    return _product(op, terms)


def _letters(text: str, own: int, width: int) -> list[str]:
    """One name per dim; the dims of an ellipsis are aligned from the right."""
    head, dots, tail = text.partition("...")
    middle = [f"...{d}" for d in range(width - own, width)] if dots else []
    return [*head, *middle, *tail]


def grouped_matmul(
    op: Op, input: Operand, weight: Operand, offs: Any = None, out_dtype: Any = None
) -> TensorType:
    """rows (M, K), one matrix (K, N) per group: each group's rows with its matrix.

    Where the groups are cut over an axis each rank must bring the rows of its own
    groups, so the rows must be its own (Varying) there.
    """
    if input.ndim == 3 and weight.ndim == 3:
        return matmul(op, input, weight)
    if (input.ndim, weight.ndim) != (2, 3):
        raise Refusal(
            "grouped_mm is known for rows (M, K) and matrices (G, K, N)", operand=input
        )
    for axis in weight.cut_axes(0):
        if input.type[axis].letter != "V":
            raise Refusal(
                "each rank holds different groups, so it needs the rows of those groups",
                axis, input, "Varying", kind="unsound",
            )  # fmt: skip
    rows: Label = 0
    if isinstance(offs, Operand):
        rows = Mixed("the group ends count rows of the whole, and this rank holds a piece")
    terms = [
        Term(input, (rows, Contract("inner"))),
        Term(weight, (Scattered(), Contract("inner"), 1)),
    ]
    if isinstance(offs, Operand):
        mixed = Mixed("group ends are needed whole on every rank")
        terms.append(Term(offs, (mixed,), is_control=True))
    return _product(op, terms)


def attention(
    op: Op,
    query: Operand,
    key: Operand,
    value: Operand,
    attn_mask: Operand | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
    *,
    shared: frozenset[str],
) -> TensorType:
    """Each query row looks at all key rows; heads and batch are independent.

    The scores are non-linear in queries and keys, and the result is linear in the values.
    Dropout multiplies the scores by a random mask, as a call of `dropout` between the two
    products would.
    """
    if query.ndim != key.ndim or key.ndim != value.ndim or query.ndim < 2:
        raise Refusal(
            "attention is known for queries, keys and values of equally many dims",
            operand=key if key.ndim != query.ndim else value,
            expected=f"{query.ndim} dims",
        )
    if enable_gqa and query.ndim > 2:
        key, value = (_for_each_head(op, x, query) for x in (key, value))
    lead = tuple(range(query.ndim - 2))
    row = query.ndim - 2
    rows: Label = row
    if is_causal:
        rows = Mixed("a causal mask needs to know where in the sequence the rows stand")
    keys = Mixed("attention looks at all keys, and this rank holds a piece of them")
    inner = Mixed("the scores need the whole head dim before the softmax")
    terms = [
        Term(query, (*lead, rows, inner)),
        Term(key, (*lead, keys, inner)),
    ]
    if isinstance(attn_mask, Operand):
        every: tuple[Label, ...] = (*lead, rows, keys)
        labels = (
            None if attn_mask.is_one_row(dim) else label
            for dim, label in enumerate(every[-attn_mask.ndim :])
        )
        terms.append(Term(attn_mask, tuple(labels), is_control=True))
    shape = (*query.shape[:-1], key.shape[-2])
    scores = inner_value(combine(op.linearity, terms), shape, query)
    if dropout_p:
        scores = replace(scores, type=masked(scores, shared))
    return combine(
        MULTILINEAR,
        [
            Term(scores, (*lead, row, None)),
            Term(value, (*lead, keys, query.ndim - 1)),
        ],
    )


def _for_each_head(op: Op, x: Operand, query: Operand) -> Operand:
    """Keys or values with one head for each head of the queries: heads are repeated."""
    heads = x.ndim - 3
    # Of all ranks: one that holds no heads must read the same.
    asked, given = (o.type.global_size(heads, o.shape[heads]) for o in (query, x))
    times = asked // max(given, 1)
    linear = replace(op, linearity=LINEAR)
    shape = (*x.shape[:heads], x.shape[heads] * times, *x.shape[heads + 1 :])
    return inner_value(repeat_interleave(linear, x, times, heads), shape, x)
