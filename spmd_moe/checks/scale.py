"""Make a layer small enough to run on simulated ranks, in the same configuration.

What can run as it is stays as it is. Else each degree becomes the least that still cuts
(2 for most), dim : hidden_dim stays, groups of experts stay, and there are fewer experts
and five tokens, which no degree divides.
"""

import math
from dataclasses import replace
from fractions import Fraction

import torch

from spmd_moe.checks.trace import Workload
from spmd_moe.config import MoEConfig, Parallel

MAX_RANKS = 16  # that are simulated in one process
MAX_PARAMETERS = 2**20
MAX_TOKENS = 1024
UNIT = 8  # dims are multiples of it


def scaled_down(
    config: MoEConfig, parallel: Parallel, work: Workload
) -> tuple[MoEConfig, Parallel, Workload] | None:
    """Return a small layer, mesh and input; None if no small mesh is cut as this one."""
    work = replace(work, dtype=torch.float64)
    if fits(config, parallel, work):
        return config, parallel, work
    small = _fewer_ranks(parallel)
    if small is None:
        return None
    tokens = replace(work, batch=min(work.batch, 2), seq_len=min(work.seq_len, 5))
    return _smaller(config, small), small, tokens


def fits(config: MoEConfig, parallel: Parallel, work: Workload) -> bool:
    """Return whether the layer can run here as it is."""
    hidden = config.hidden_dim * config.num_experts + config.shared_hidden_dim
    tokens = work.batch * parallel.dp * work.seq_len
    return (
        parallel.num_ranks <= MAX_RANKS
        and 3 * config.dim * hidden <= MAX_PARAMETERS
        and tokens <= MAX_TOKENS
    )


def _fewer_ranks(parallel: Parallel) -> Parallel | None:
    cp, tp = least_factor(parallel.cp), least_factor(parallel.tp)
    etp = tp if parallel.etp > 1 else 1
    cuts_experts = parallel.ep > 1
    for dp in divisors(parallel.dp):
        ranks = dp * cp * tp // etp
        ep = math.gcd(parallel.ep, ranks)
        spreads = parallel.dp == 1 or dp > 1
        if ranks * etp <= MAX_RANKS and spreads and (ep > 1 or not cuts_experts):
            return replace(parallel, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp)
    return None


def _smaller(config: MoEConfig, parallel: Parallel) -> MoEConfig:
    ratio = Fraction(config.dim, config.hidden_dim).limit_denominator(UNIT)
    unit = math.lcm(UNIT, parallel.tp)
    step = math.lcm(parallel.ep, config.num_expert_groups or 1)
    least = max(2 * config.top_k, 4 * (config.num_expert_groups or 1))
    if config.num_expert_groups and config.num_limited_groups:
        share = -(-config.top_k // config.num_limited_groups)
        least = max(least, share * config.num_expert_groups)
    return replace(
        config,
        dim=min(config.dim, unit * max(1, ratio.numerator)),
        hidden_dim=unit * ratio.denominator,
        num_experts=min(config.num_experts, -(-least // step) * step),
    )


def divisors(n: int) -> list[int]:
    """Return all divisors of `n`, ascending, by trial up to the square root."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def least_factor(n: int) -> int:
    """Return the least divisor of `n` above 1; of 1 it is 1."""
    return (*divisors(n), 1)[1]
