"""Programs: refused, or equal to one device in values and gradients."""

from hypothesis import given

from placements.testing.laws.short_programs import check_program, programs
from placements.testing.programs import Input, Program, Statement
from placements.types.axis import AxisType, R, Shard
from placements.types.mesh import Mesh


def test_many_programs_are_accepted_and_equal_one_device() -> None:
    accepted: list[bool] = []

    @given(programs())
    def law(program: Program) -> None:
        accepted.append(check_program(program))

    law()
    assert sum(accepted) > len(accepted) // 4


def test_a_program_that_mixes_pieces_and_wholes_is_refused() -> None:
    inputs = Input((4, 4), (("tp", R),)), Input((4, 4), (("tp", Shard(0)),))
    program = Program(Mesh({"tp": 2}), inputs, (Statement("x0 + x1"),))
    assert not check_program(program)


def test_a_megatron_pair_of_products_is_accepted() -> None:
    types: list[AxisType] = [R, Shard(1), Shard(0)]
    inputs = tuple(Input((3, 3), (("tp", t),)) for t in types)
    texts = "x0 @ x1", "relu(x3)", "x4 @ x2", "to(x5, 'tp', R)"
    program = Program(Mesh({"tp": 2}), inputs, tuple(map(Statement, texts)), seed=1)
    assert check_program(program)
