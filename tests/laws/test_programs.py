"""Programs: refused, or equal to one device in values and gradients."""

from hypothesis import given

from placements.testing.laws.programs import Program, Step, check_program, programs
from placements.types.axis import R, Shard
from placements.types.mesh import Mesh


def test_many_programs_are_accepted_and_equal_one_device() -> None:
    accepted: list[bool] = []

    @given(programs())
    def law(program: Program) -> None:
        accepted.append(check_program(program))

    law()
    assert sum(accepted) > len(accepted) // 4


def test_a_program_that_mixes_pieces_and_wholes_is_refused() -> None:
    program = Program(
        Mesh({"tp": 2}), 4, ({"tp": R}, {"tp": Shard(0)}), (Step("add", (0, 1)),), 0
    )
    assert not check_program(program)


def test_a_megatron_pair_of_products_is_accepted() -> None:
    types = ({"tp": R}, {"tp": Shard(1)}, {"tp": Shard(0)})
    steps = (
        Step("matmul", (0, 1)),
        Step("relu", (3,)),
        Step("matmul", (4, 2)),
        Step("redistribute", (5,), axis="tp", dst=R),
    )
    assert check_program(Program(Mesh({"tp": 2}), 3, types, steps, 1))
