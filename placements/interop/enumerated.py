"""Programs to go through in full: every op and every call once, on one mesh axis.

There are finitely many types on one axis, so programs of one statement are enumerated for
all of them. What needs two axes or two statements is a short list.
"""

from collections.abc import Iterator, Mapping
from itertools import product

from placements.interop.vocabulary import MOVES, TEMPLATES, move_of, types_of_letters
from placements.testing.programs import INTEGER, Input, Program, Statement
from placements.types.axis import AxisType, I, P, R, Shard, V
from placements.types.mesh import Mesh

ONE_AXIS, TWO_AXES = Mesh({"tp": 2}), Mesh({"dp": 2, "tp": 2})


def one_statement_programs() -> Iterator[Program]:
    """Yield every template and every call, for all types of the operands on one axis."""
    for template in TEMPLATES:
        choices = [
            [
                Input((4,) * ndim, (("tp", t),), kind)
                for t in types_of_letters("RIVS" if kind == INTEGER else "RIVPS", ndim)
            ]
            for kind, ndim in zip(template.kinds, template.ndims, strict=False)
        ]
        for inputs in product(*choices):
            dims = range(len(inputs[0].shape)) if template.has_dim else [0]
            for dim in dims:
                statement = template.statement(range(len(inputs)), dim)
                yield Program(ONE_AXIS, inputs, (statement,))
    for call, letters in MOVES.items():
        sources, targets = (types_of_letters(each, 2) for each in letters)
        for held, src, dst in product(types_of_letters("RIVPS", 2), sources, targets):
            x = Input((2, 4), (("tp", held),))
            yield Program(ONE_AXIS, (x,), (move_of(call, 0, "tp", src, dst),))


def _program(
    shape: tuple[int, ...], types: Mapping[str, AxisType], *statements: Statement
) -> Program:
    mesh = ONE_AXIS if len(types) == 1 else TWO_AXES
    return Program(mesh, (Input(shape, tuple(types.items())),), statements)


# What one statement on one axis does not show.
LONGER: tuple[Program, ...] = (
    _program(
        (4, 4), {"tp": P},
        Statement("x0.mT", "{a}.mT"), move_of("all_reduce", 1, "tp", P, R),
    ),
    _program(
        (2, 4), {"tp": P},
        move_of("reduce_scatter", 0, "tp", P, V), Statement("relu(x1)", "relu({a})"),
    ),
    _program((4, 4), {"dp": R, "tp": Shard(0)}, move_of("convert", 0, "dp", R, Shard(0))),
    _program(
        (4, 4), {"dp": Shard(0), "tp": Shard(0)},
        move_of("all_gather", 0, "dp", Shard(0), R),
    ),
    _program(
        (4, 4), {"dp": Shard(0), "tp": Shard(0)},
        move_of("redistribute", 0, "dp", Shard(0), Shard(0)),
    ),
    _program((2, 4), {"dp": Shard(1), "tp": P}, move_of("reduce_scatter", 0, "tp", P, V)),
    _program((4,), {"dp": Shard(0), "tp": R}, move_of("convert", 0, "tp", R, V)),
    _program((4,), {"dp": Shard(0), "tp": I}, move_of("convert", 0, "tp", I, V)),
    _program((1, 4), {"tp": R}, move_of("convert", 0, "tp", R, Shard(0))),
    _program((4, 3), {"tp": Shard(0)}, move_of("all_to_all", 0, "tp", Shard(0), Shard(1))),
    _program((4, 4), {"tp": V}, move_of("all_to_all", 0, "tp", V, V)),
    _program(
        (4, 4), {"tp": Shard(0)},
        Statement("x0.unflatten(0, (-1, 2))", "{a}.unflatten({d}, (-1, 2))"),
        Statement("x1.unflatten(0, (2, -1))", "{a}.unflatten({d}, (2, -1))"),
    ),
)  # fmt: skip


def all_programs() -> Iterator[Program]:
    yield from one_statement_programs()
    yield from LONGER
