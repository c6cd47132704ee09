"""What was trained on ranks is what one device has: parameters and state."""

from typing import Any

import torch
from torch import Tensor

from placements import join, type_of
from tests.support.trained import AXES, Trained


def check_equal(ranks: list[Trained], one: Trained, types: dict[str, Any]) -> None:
    """Parameters and state, put together by the types of the parameters."""
    for name, whole in one.parameters.items():
        found = join([rank.parameters[name] for rank in ranks], types[name], AXES)
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
        for moment, value in one.state[name].items():
            held = [rank.state[name][moment] for rank in ranks]
            if not isinstance(value, Tensor):
                assert held == [value] * len(ranks)
            elif value.shape != whole.shape:
                for mine in held:
                    torch.testing.assert_close(mine, value, rtol=1e-12, atol=1e-12)
            else:
                found = join(held, types[name], AXES)
                torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-12)
                assert all(type_of(mine) == types[name] for mine in held)
