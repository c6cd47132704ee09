"""Programs to go through in full: every op and every call once, on one mesh axis.

Types on one axis are finite, so one step over all of them is enumerated; what needs two
axes or two steps is a short list.
"""

from collections.abc import Iterator, Mapping
from itertools import product

from placements.interop.programs import (
    FORMS,
    INTEGER,
    MOVES,
    Input,
    Program,
    Step,
    axis_types,
    move,
)
from placements.types.axis import AxisType, I, P, R, Shard, V

ONE_AXIS: Mapping[str, int] = {"tp": 2}
TWO_AXES: Mapping[str, int] = {"dp": 2, "tp": 2}


def one_step_programs() -> Iterator[Program]:
    """Every form and every call, for all types of the operands on one axis."""
    sizes = tuple(ONE_AXIS.items())
    for form in FORMS:
        choices = [
            [
                Input((4,) * ndim, (("tp", t),), kind)
                for t in axis_types("RIVS" if kind == INTEGER else "RIVPS", ndim)
            ]
            for kind, ndim in zip(form.kinds, form.ndims, strict=False)
        ]
        for inputs in product(*choices):
            dims = range(len(inputs[0].shape)) if form.has_dim else [0]
            for dim in dims:
                step = form.step(range(len(inputs)), dim)
                yield Program(sizes, tuple(inputs), (step,))
    for call, letters in MOVES.items():
        sources, targets = (axis_types(each, 2) for each in letters)
        for held, src, dst in product(axis_types("RIVPS", 2), sources, targets):
            x = Input((2, 4), (("tp", held),))
            yield Program(sizes, (x,), (move(call, 0, "tp", src, dst),))


def _program(
    shape: tuple[int, ...], types: Mapping[str, AxisType], *steps: Step
) -> Program:
    sizes = ONE_AXIS if len(types) == 1 else TWO_AXES
    return Program(tuple(sizes.items()), (Input(shape, tuple(types.items())),), steps)


# What one step on one axis does not show.
LONGER: tuple[Program, ...] = (
    _program(
        (4, 4), {"tp": P},
        Step("x0.mT", (0,), "{a}.mT"), move("all_reduce", 1, "tp", P, R),
    ),
    _program(
        (2, 4), {"tp": P},
        move("reduce_scatter", 0, "tp", P, V), Step("relu(x1)", (1,), "relu({a})"),
    ),
    _program((4, 4), {"dp": R, "tp": Shard(0)}, move("convert", 0, "dp", R, Shard(0))),
    _program(
        (4, 4), {"dp": Shard(0), "tp": Shard(0)}, move("all_gather", 0, "dp", Shard(0), R)
    ),
    _program(
        (4, 4), {"dp": Shard(0), "tp": Shard(0)},
        move("redistribute", 0, "dp", Shard(0), Shard(0)),
    ),
    _program((2, 4), {"dp": Shard(1), "tp": P}, move("reduce_scatter", 0, "tp", P, V)),
    _program((4,), {"dp": Shard(0), "tp": R}, move("convert", 0, "tp", R, V)),
    _program((4,), {"dp": Shard(0), "tp": I}, move("convert", 0, "tp", I, V)),
    _program((1, 4), {"tp": R}, move("convert", 0, "tp", R, Shard(0))),
    _program((4, 3), {"tp": Shard(0)}, move("all_to_all", 0, "tp", Shard(0), Shard(1))),
    _program((4, 4), {"tp": V}, move("all_to_all", 0, "tp", V, V)),
    _program(
        (4, 4), {"tp": Shard(0)},
        Step("x0.unflatten(0, (-1, 2))", (0,), "{a}.unflatten({d}, (-1, 2))"),
        Step("x1.unflatten(0, (2, -1))", (1,), "{a}.unflatten({d}, (2, -1))"),
    ),
)  # fmt: skip


def all_programs() -> Iterator[Program]:
    yield from one_step_programs()
    yield from LONGER
