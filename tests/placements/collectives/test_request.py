"""What a typed collective refuses before anything is sent."""

import pytest

from placements import P, R, S, all_gather, reduce_scatter
from tests.support.checked import checked_on
from tests.support.checked import ones_of as of

checked = checked_on(tp=2)


@pytest.mark.parametrize("dim", [5, -5])
def test_a_dim_that_does_not_exist_is_an_error(dim: int) -> None:
    with pytest.raises(ValueError, match="do not have"):
        all_gather(of(S(0), 2, 3), "tp", src=S(dim), dst=R)
    with pytest.raises(ValueError, match="do not have"):
        reduce_scatter(of(P, 2, 3), "tp", src=P, dst=S(dim))
