"""The statements that all engines can be asked about: ops and collectives."""

from collections.abc import Mapping

from placements.testing.programs import FLOAT, INTEGER, Statement, Template
from placements.types.axis import AxisType, I, P, R, Shard, V

_TWO, _THREE = (FLOAT, FLOAT), (FLOAT, FLOAT, FLOAT)

# What all engines can be asked. In-place and random ops, and indices with a domain, are
# ours alone.
TEMPLATES: tuple[Template, ...] = (
    Template("relu({a})"),
    Template("exp({a})"),
    Template("-{a}"),
    Template("{a}.clone()"),
    Template("{a} + 1.0"),
    Template("{a} * 2.0"),
    Template("{a} / 2.0"),
    Template("2.0 / {a}"),
    Template("{a} + {b}", _TWO),
    Template("{a} - {b}", _TWO),
    Template("{a} * {b}", _TWO),
    Template("{a} / {b}", _TWO),
    Template("maximum({a}, {b})", _TWO),
    Template("where({a} > 0.0, {b}, {c})", _THREE),
    Template("matmul({a}, {b})", _TWO),
    Template("linear({a}, {b})", _TWO),
    Template("linear({a}, {b}, {c})", _THREE, (2, 2, 1)),
    Template("addmm({a}, {b}, {c})", _THREE),
    Template("bmm({a}, {b})", _TWO, (3, 3)),
    Template("einsum('ij,jk->ik', {a}, {b})", _TWO),
    Template("{a}.sum()"),
    Template("{a}.sum({d})"),
    Template("{a}.mean({d})"),
    Template("{a}.amax({d})"),
    Template("{a}.var({d})"),
    Template("{a}.logsumexp({d})"),
    Template("softmax({a}, {d})"),
    Template("{a}.cumsum({d})"),
    Template("{a}.sort({d}).values"),
    Template("{a}.topk(1, {d}).values"),
    Template("layer_norm({a}, {a}.shape[-1:])"),
    Template("{a}.mT"),
    Template("{a}.transpose(0, {d})"),
    Template("{a}.unsqueeze({d})"),
    Template("{a}.flatten()"),
    Template("{a}.flatten(0, 1)"),
    Template("{a}.unflatten({d}, (2, -1))"),
    Template("{a}.unflatten({d}, (-1, 2))"),
    Template("{a}.select({d}, 0)"),
    Template("{a}.narrow({d}, 1, 1)"),
    Template("{a}.chunk(2, {d})[0]"),
    Template("{a}.flip({d})"),
    Template("cat([{a}, {b}], {d})", _TWO),
    Template("stack([{a}, {b}], {d})", _TWO),
    Template("{a}.index_select({d}, {b})", (FLOAT, INTEGER), (2, 1)),
    Template("{a}.gather({d}, {b})", (FLOAT, INTEGER)),
    Template("embedding({b}, {a})", (FLOAT, INTEGER), (2, 1)),
    Template("{a}.scatter_add({d}, {b}, {c})", (FLOAT, INTEGER, FLOAT)),
)

# call -> the letters that src and dst are drawn from
MOVES: Mapping[str, tuple[str, str]] = {
    "all_reduce": ("PV", "RI"),
    "all_gather": ("SV", "RI"),
    "reduce_scatter": ("PV", "SV"),
    "all_to_all": ("SV", "SV"),
    "convert": ("RIVPS", "RIVPS"),
    "reinterpret": ("RIVPS", "RIVPS"),
    "redistribute": ("RIVPS", "RIVPS"),
}
_SINGLE: Mapping[str, AxisType] = {"R": R, "I": I, "V": V, "P": P}


def types_of_letters(letters: str, ndim: int) -> list[AxisType]:
    """Return the types of these letters, with a Shard of each dim for S."""
    types = [_SINGLE[letter] for letter in letters if letter != "S"]
    return types + [Shard(d) for d in range(ndim) if "S" in letters]


def move_of(call: str, arg: int, axis: str, src: AxisType, dst: AxisType) -> Statement:
    """Return the statement that makes a collective, or a cast, of one value."""
    text = f"{call}(x{arg}, {axis!r}, src={src!r}, dst={dst!r})"
    return Statement(text, call, (call, axis, without_extent(src), without_extent(dst)))


def without_extent(t: AxisType) -> AxisType:
    """Return the type, for a Shard without what it says of the lengths of pieces."""
    return Shard(t.dim) if isinstance(t, Shard) else t
