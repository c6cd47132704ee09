"""What an MoE layer is, and over which ranks: two frozen records, checked when made.

A record that exists is right by itself; `check_together` says whether the two fit. Every
mistake is a ValueError that names the field, its value and what it must be.
"""

import math
from dataclasses import dataclass

SCORE_FUNCTIONS = ("sigmoid", "softmax")


def _require(holds: bool, field: str, value: object, must: str) -> None:
    if not holds:
        raise ValueError(f"{field} ({value!r}) must {must}")


def _positive(field: str, value: int) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    _require(is_int and value >= 1, field, value, "be a whole number of at least 1")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sizes and routing of one MoE layer; nothing about ranks.

    `num_expert_groups` and `num_limited_groups` go together: each token chooses among the
    experts of its best `num_limited_groups` groups. `load_balance_coeff` is the step of
    `update_expert_bias`. `round_robin` (for debugging) gives the slots to the experts in
    turn, from expert 0 on every rank; the gates are still those of the scores. Gates weigh
    in at least float32; with `narrow_gates` they weigh in the dtype of the rows. With
    `combine_in_place` and gradients off, the rows of the routed experts are added into the
    output of the shared ones; both make bfloat16 less precise.
    """

    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    num_shared_experts: int = 0
    score_function: str = "sigmoid"
    route_norm: bool = False
    route_scale: float = 1.0
    score_before_experts: bool = False
    num_expert_groups: int | None = None
    num_limited_groups: int | None = None
    load_balance_coeff: float | None = None
    round_robin: bool = False
    narrow_gates: bool = False
    combine_in_place: bool = False

    def __post_init__(self) -> None:
        for field in ("dim", "hidden_dim", "num_experts", "top_k"):
            _positive(field, getattr(self, field))
        shared = self.num_shared_experts
        _require(shared >= 0, "num_shared_experts", shared, "be at least 0")
        _require(
            self.top_k <= self.num_experts, "top_k", self.top_k,
            f"be at most num_experts ({self.num_experts})",
        )  # fmt: skip
        _require(
            self.score_function in SCORE_FUNCTIONS, "score_function", self.score_function,
            f"be one of {', '.join(SCORE_FUNCTIONS)}",
        )  # fmt: skip
        scale = self.route_scale
        _require(math.isfinite(scale), "route_scale", scale, "be a finite number")
        coeff = self.load_balance_coeff
        _require(coeff is None or coeff > 0, "load_balance_coeff", coeff, "be above 0")
        self._check_groups()

    def _check_groups(self) -> None:
        groups, limit = self.num_expert_groups, self.num_limited_groups
        if groups is None:
            _require(
                limit is None, "num_limited_groups", limit,
                "be unset while num_expert_groups is",
            )  # fmt: skip
            return
        _positive("num_expert_groups", groups)
        _require(
            self.num_experts % groups == 0, "num_experts", self.num_experts,
            f"be divisible by num_expert_groups ({groups})",
        )  # fmt: skip
        size = self.num_experts // groups
        _require(
            size >= 2, "num_expert_groups", groups,
            f"leave at least 2 of the num_experts ({self.num_experts}) in each group",
        )  # fmt: skip
        _require(
            limit is not None and 1 <= limit <= groups, "num_limited_groups", limit,
            f"be set, from 1 to num_expert_groups ({groups})",
        )  # fmt: skip
        assert limit is not None
        _require(
            self.top_k <= limit * size, "top_k", self.top_k,
            f"be at most the {limit * size} experts of num_limited_groups ({limit}) groups",
        )  # fmt: skip

    @property
    def shared_hidden_dim(self) -> int:
        return self.num_shared_experts * self.hidden_dim


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How many ranks each axis has: dense mesh (dp, cp, tp), sparse mesh (edp, ep, etp).

    Both meshes are over the same ranks in the same order. With `ep=1` the experts are cut
    over tp, on the dense mesh. With `ep > 1` an expert is whole on one rank (`etp=1`, and
    tp ranks are folded into ep), or cut over tp as well (`etp=tp`). `sequence_parallel`:
    the input and the output are cut along the sequence over tp.

    Two fields are for fast paths over ep (docs/fast_paths.md). `equal_tokens` promises that
    all ranks of ep have equally many tokens, so that under round robin nobody tells anybody
    how many rows come; the layer checks it of the sequence, and `verify()` of the batch.
    `max_padding` makes the splits of an exchange equal where padding is at most this part
    of the real rows of any rank: None is never, `math.inf` always.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    equal_tokens: bool = False
    max_padding: float | None = None

    def __post_init__(self) -> None:
        for field in ("dp", "cp", "tp", "ep", "etp"):
            _positive(field, getattr(self, field))
        _require(
            self.etp in (1, self.tp), "etp", self.etp, f"be 1 or equal to tp ({self.tp})"
        )
        ranks = self.num_ranks // self.expert_tp
        product = "dp * cp" if self.expert_tp > 1 else "dp * cp * tp"
        _require(ranks % self.ep == 0, "ep", self.ep, f"divide {product} ({ranks})")
        padding = self.max_padding
        _require(padding is None or padding >= 0, "max_padding", padding, "be at least 0")

    @property
    def num_ranks(self) -> int:
        return self.dp * self.cp * self.tp

    @property
    def expert_tp(self) -> int:
        """The number of ranks over which one expert is cut."""
        return self.tp if self.ep == 1 else self.etp

    def dense_mesh(self) -> dict[str, int]:
        """Return the axes of activations and their sizes, outermost first."""
        return {"dp": self.dp, "cp": self.cp, "tp": self.tp}

    def sparse_mesh(self) -> dict[str, int]:
        """Return the axes of experts and their sizes, outermost first."""
        edp = self.num_ranks // (self.ep * self.expert_tp)
        return {"edp": edp, "ep": self.ep, "etp": self.expert_tp}


def check_together(config: MoEConfig, parallel: Parallel) -> None:
    """Raise ValueError unless this layer can be cut over these ranks."""
    _require(
        config.num_experts % parallel.ep == 0, "num_experts", config.num_experts,
        f"be divisible by ep ({parallel.ep})",
    )  # fmt: skip
    name = "tp" if parallel.ep == 1 else "etp"
    _require(
        config.hidden_dim % parallel.expert_tp == 0, "hidden_dim", config.hidden_dim,
        f"be divisible by {name} ({parallel.expert_tp})",
    )  # fmt: skip
    _require(
        config.shared_hidden_dim % parallel.tp == 0,
        "num_shared_experts * hidden_dim", config.shared_hidden_dim,
        f"be divisible by tp ({parallel.tp})",
    )  # fmt: skip
