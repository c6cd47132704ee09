"""The numbers into which ranks can be cut, by trial up to the square root."""

import math


def divisors(n: int) -> list[int]:
    """All of them, ascending."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def least_factor(n: int) -> int:
    """The least divisor above 1; 1 of 1."""
    return (*divisors(n), 1)[1]
