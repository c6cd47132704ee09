"""The statements that all engines can be asked about: ops and collectives."""

from collections.abc import Mapping

from placements.testing.programs import FLOAT, INTEGER, Form, Statement
from placements.types.axis import AxisType, I, P, R, Shard, V

_TWO, _THREE = (FLOAT, FLOAT), (FLOAT, FLOAT, FLOAT)

# What all engines can be asked. In-place and random ops, and indices with a domain, are
# ours alone.
FORMS: tuple[Form, ...] = (
    Form("relu({a})"),
    Form("exp({a})"),
    Form("-{a}"),
    Form("{a}.clone()"),
    Form("{a} + 1.0"),
    Form("{a} * 2.0"),
    Form("{a} / 2.0"),
    Form("2.0 / {a}"),
    Form("{a} + {b}", _TWO),
    Form("{a} - {b}", _TWO),
    Form("{a} * {b}", _TWO),
    Form("{a} / {b}", _TWO),
    Form("maximum({a}, {b})", _TWO),
    Form("where({a} > 0.0, {b}, {c})", _THREE),
    Form("matmul({a}, {b})", _TWO),
    Form("linear({a}, {b})", _TWO),
    Form("linear({a}, {b}, {c})", _THREE, (2, 2, 1)),
    Form("addmm({a}, {b}, {c})", _THREE),
    Form("bmm({a}, {b})", _TWO, (3, 3)),
    Form("einsum('ij,jk->ik', {a}, {b})", _TWO),
    Form("{a}.sum()"),
    Form("{a}.sum({d})"),
    Form("{a}.mean({d})"),
    Form("{a}.amax({d})"),
    Form("{a}.var({d})"),
    Form("{a}.logsumexp({d})"),
    Form("softmax({a}, {d})"),
    Form("{a}.cumsum({d})"),
    Form("{a}.sort({d}).values"),
    Form("{a}.topk(1, {d}).values"),
    Form("layer_norm({a}, {a}.shape[-1:])"),
    Form("{a}.mT"),
    Form("{a}.transpose(0, {d})"),
    Form("{a}.unsqueeze({d})"),
    Form("{a}.flatten()"),
    Form("{a}.flatten(0, 1)"),
    Form("{a}.unflatten({d}, (2, -1))"),
    Form("{a}.unflatten({d}, (-1, 2))"),
    Form("{a}.select({d}, 0)"),
    Form("{a}.narrow({d}, 1, 1)"),
    Form("{a}.chunk(2, {d})[0]"),
    Form("{a}.flip({d})"),
    Form("cat([{a}, {b}], {d})", _TWO),
    Form("stack([{a}, {b}], {d})", _TWO),
    Form("{a}.index_select({d}, {b})", (FLOAT, INTEGER), (2, 1)),
    Form("{a}.gather({d}, {b})", (FLOAT, INTEGER)),
    Form("embedding({b}, {a})", (FLOAT, INTEGER), (2, 1)),
    Form("{a}.scatter_add({d}, {b}, {c})", (FLOAT, INTEGER, FLOAT)),
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
