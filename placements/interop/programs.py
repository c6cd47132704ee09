"""Straight-line programs as data, in the vocabulary that the peers share.

A program is text: `x2 = x0 @ x1`, `x3 = all_reduce(x2, 'tp', src=P, dst=R)`. Moving code
between the engines is a change of import, so the same text runs under each of them; only
the names that it meets differ. What is drawn is left to a `choose` function, so that
hypothesis and a plain random generator build the same programs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from placements.runtime.declared import declared
from placements.types.axis import AxisType, I, P, R, Shard, V
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType

Choose = Callable[[Sequence[Any]], Any]

FLOAT, INTEGER = "float", "integer"

# Small enough to be quick; every dim can be cut over both axes.
MESHES: tuple[dict[str, int], ...] = ({"tp": 2}, {"dp": 2, "tp": 2})
SHAPES: tuple[tuple[int, ...], ...] = ((4, 4), (4,), (4, 4, 4))


@dataclass(frozen=True)
class Input:
    """A tensor that the program starts with: its global shape and its type."""

    shape: tuple[int, ...]
    types: tuple[tuple[str, AxisType], ...]  # in the order of the cuts
    kind: str = FLOAT

    def type_on(self, mesh: Mesh) -> TensorType:
        return declared(mesh, dict(self.types), self.local_shape(mesh))

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        shape = list(self.shape)
        for axis, t in self.types:
            if isinstance(t, Shard):
                shape[t.dim] //= mesh.sizes[axis]
        return tuple(shape)


@dataclass(frozen=True)
class Step:
    """One statement, over the values x0, x1, ... so far."""

    text: str
    args: tuple[int, ...]
    form: str  # the template that it was made from: names the op in tables
    move: tuple[str, str, AxisType, AxisType] | None = None  # call, axis, src, dst


@dataclass(frozen=True)
class Program:
    """Inputs x0, x1, ..., then one value for every step."""

    sizes: tuple[tuple[str, int], ...]
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]

    @property
    def mesh(self) -> Mesh:
        return Mesh(dict(self.sizes))

    @property
    def communicates(self) -> bool:
        """Whether some step may communicate, forward or backward."""
        return any(step.move is not None for step in self.steps)

    def __str__(self) -> str:
        said = [
            f"x{k}: {'i64' if x.kind == INTEGER else 'f64'}{list(x.shape)}"
            f"{{{', '.join(f'{axis}:{t!r}' for axis, t in x.types)}}}"
            for k, x in enumerate(self.inputs)
        ]
        first = len(self.inputs)
        done = [f"x{first + k} = {step.text}" for k, step in enumerate(self.steps)]
        return "; ".join([*said, *done])

    __repr__ = __str__


@dataclass(frozen=True)
class Form:
    """A kind of step: `{a}`, `{b}`, `{c}` are operands, `{d}` is a dim of the first."""

    template: str
    kinds: tuple[str, ...] = (FLOAT,)
    ndims: tuple[int, ...] = (2, 2, 2)  # of operands that fit together

    @property
    def has_dim(self) -> bool:
        return "{d}" in self.template

    def step(self, args: Sequence[int], dim: int = 0) -> Step:
        names = {letter: f"x{k}" for letter, k in zip("abc", args, strict=False)}
        text = self.template.format(**names, d=dim)
        return Step(text, tuple(args), self.template)


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


def axis_types(letters: str, ndim: int) -> list[AxisType]:
    """The types of these letters; a Shard of each dim."""
    types = [_SINGLE[letter] for letter in letters if letter != "S"]
    return types + [Shard(d) for d in range(ndim) if "S" in letters]


def move(call: str, arg: int, axis: str, src: AxisType, dst: AxisType) -> Step:
    text = f"{call}(x{arg}, {axis!r}, src={src!r}, dst={dst!r})"
    return Step(text, (arg,), call, (call, axis, _bare(src), _bare(dst)))


def _bare(t: AxisType) -> AxisType:
    return Shard(t.dim) if isinstance(t, Shard) else t


def choose_input(choose: Choose, sizes: Mapping[str, int], kind: str, shape: Any) -> Input:
    letters = "RRSSVI" if kind == INTEGER else "RRSSSPVI"
    axes = list(sizes)
    if len(axes) > 1 and choose([False, True]):
        axes.reverse()
    types = [(axis, choose(axis_types(letters, len(shape)))) for axis in axes]
    left = list(shape)
    for k, (axis, t) in enumerate(types):
        if isinstance(t, Shard):
            if left[t.dim] % sizes[axis]:
                types[k] = (axis, R)
            else:
                left[t.dim] //= sizes[axis]
    return Input(shape, tuple(types), kind)


def choose_inputs(choose: Choose, sizes: Mapping[str, int]) -> tuple[Input, ...]:
    shape = choose(SHAPES)
    shapes = [shape, shape, choose(SHAPES)]
    inputs = [choose_input(choose, sizes, FLOAT, s) for s in shapes]
    if choose([False, True]):
        inputs.append(choose_input(choose, sizes, INTEGER, choose([(4,), shape])))
    return tuple(inputs)


def choose_step(
    choose: Choose,
    program: Program,
    kinds: Sequence[str],
    types: Sequence[TensorType],
    ndims: Sequence[int],
) -> Step | None:
    """Another step for a program whose values have these kinds, types and dims."""
    if choose([True, False, False]):
        return _choose_move(choose, program, types, ndims)
    form: Form = choose(FORMS)
    args: list[int] = []
    for kind in form.kinds:
        fitting = [k for k, other in enumerate(kinds) if other == kind]
        if not fitting:
            return None
        args.append(choose(fitting[-3:]))
    if not form.has_dim:
        return form.step(args)
    return form.step(args, choose(range(ndims[args[0]]))) if ndims[args[0]] else None


def _choose_move(
    choose: Choose, program: Program, types: Sequence[TensorType], ndims: Sequence[int]
) -> Step | None:
    arg: int = choose(range(len(types)))
    axis: str = choose([axis for axis, _ in program.sizes])
    call: str = choose(list(MOVES))
    sources, targets = (axis_types(letters, ndims[arg]) for letters in MOVES[call])
    actual = types[arg][axis]
    # Mostly the type that the tensor has; now and then a claim that is wrong.
    src: AxisType = (
        actual if choose([True, True, True, False]) else choose(sources or [actual])
    )
    return move(call, arg, axis, src, choose(targets)) if targets else None
