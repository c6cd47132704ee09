"""The type of the gradient, given the type of the value: one table."""

from placements.types import AxisType, I, P, R, Shard, V

# value -> gradient. A Shard's gradient is the same Shard: same dim, same extent.
DUALS: dict[str, AxisType] = {"R": P, "I": I, "V": V, "P": R}

REASONS: dict[str, str] = {
    "R": "each rank used the value in its own way, so its gradient is one summand",
    "I": "all ranks did the same computation, so all hold the same whole gradient",
    "V": "the value is the rank's own, and so is its gradient",
    "S": "each rank holds the gradient of its own piece",
    "P": "every summand enters the sum with weight one, so all get the same gradient",
}


def dual(axis_type: AxisType) -> AxisType:
    """AxisType -> the AxisType of the gradient."""
    if isinstance(axis_type, Shard):
        return axis_type
    return DUALS[axis_type.letter]
