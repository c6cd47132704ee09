"""One axis type of every kind, and every kind of extent."""

from placements import Folded, I, P, Padded, R, Ragged, S, V, ZigZag
from placements.types.axis import AxisType

ALL: list[AxisType] = [
    R,
    I,
    V,
    P,
    S(0),
    S(2, Padded(5)),
    S(1, Folded(2, Padded(5))),
    S(0, Ragged(3, 1)),
    S(0, ZigZag(16)),
    S(0, Folded(3, ZigZag(16))),
]
