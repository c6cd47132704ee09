"""MoE: route -> dispatch -> experts -> combine, plus the shared experts.

The table in `layouts.py` says what each tensor is at each stage, and so what must move:
`_move` takes a tensor over tp from its type at one stage to its type at the next. The
comment at each move of `MoE.forward` says what runs forward in which configuration; in one
that the comment does not name, the tensor stays as it is. A test, `test_layer_moves.py`,
holds the comments to the table. Before rows travel, ranks agree on how many of them do, as
`paths/agreement.py` says.
"""

import math
from typing import Annotated, Any

import torch
from torch import Tensor

from placements import (
    AxisType,
    Extent,
    Folded,
    MeshLike,
    On,
    Padded,
    Shard,
    as_mesh,
    current_mesh,
    redistribute,
    type_of,
    typed,
)
from spmd_moe.auxiliary import KeepsRoutings
from spmd_moe.combine import combine, combine_in_pieces, combine_into
from spmd_moe.compute.by_expert import is_plain_cpu
from spmd_moe.config import MoEConfig, Parallel, check_together
from spmd_moe.dims import TD, OtherTD, X
from spmd_moe.dispatch import AbstractDispatcher, LocalDispatcher
from spmd_moe.dispatch_all_to_all import AllToAllDispatcher, agreement_of
from spmd_moe.experts import GroupedExperts, SharedExperts
from spmd_moe.layouts import Types, configuration, layout
from spmd_moe.meshes import ONE_DEVICE, dense_mesh, has_axis, make_sparse_mesh
from spmd_moe.route import Router


@typed
class MoE(KeepsRoutings):
    """A Mixture-of-Experts layer on local tensors.

    Make it and call it with the dense mesh current; one rank needs no mesh. `sparse_mesh`
    is the DeviceMesh of `parallel.sparse_mesh()`, to be shared by layers; without one each
    layer makes its own, which is collective. Equal seeds give equal global weights on every
    mesh, and to every layer of equal sizes: give each layer of a model a seed of its own.

    `dtype` is that of the parameters, whose values are those of float32, rounded; the
    expert bias is float32 (float64 after `.double()`) and the counts are int64 always. With
    `device="meta"` nothing is drawn yet: after `to_empty(device=...)`, `reset_parameters()`
    gives all state the values that construction gives. Under autocast the experts compute
    in autocast's dtype, which the output has too, while experts are chosen and weighed in
    at least float32. As everywhere in torch, autocast leaves float64 alone.

    Parameters are Replicate on the axes where ranks add to their gradient, so nothing here
    reduces gradients: after backward call `reduce_gradients(module, meshes=moe.meshes)`,
    once. `moe.meshes` are the meshes on which its parameters live: the dense one, and with
    expert parallelism the sparse one. `clip_grad_norm_` and `global_state_dict` take them
    too.
    """

    def __init__(
        self,
        config: MoEConfig,
        parallel: Parallel = Parallel(),  # noqa: B008 - frozen
        *,
        sparse_mesh: "MeshLike | None" = None,
        seed: int = 0,
        device: "torch.device | str | None" = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_together(config, parallel)
        self.config, self.parallel = config, parallel
        self.layout = layout(configuration(parallel))
        mesh = dense_mesh(parallel)
        self.dispatcher: AbstractDispatcher
        before = config.score_before_experts
        if parallel.ep == 1:
            expert_mesh = mesh
            self.dispatcher = LocalDispatcher(self.layout, before)
        else:
            expert_mesh = as_mesh(sparse_mesh or make_sparse_mesh(parallel, mesh))
            self.dispatcher = AllToAllDispatcher(
                self.layout, expert_mesh, before, agreement_of(config, parallel)
            )
        # The meshes on which parameters live, for `reduce_gradients` and its like.
        self.meshes = (mesh,) if parallel.ep == 1 else (mesh, expert_mesh)
        made: Any = {"seed": seed, "device": device, "dtype": dtype}
        self.router = Router(config, self.layout, mesh, **made)
        self.experts = GroupedExperts(config, self.layout, expert_mesh, **made)
        self.shared_experts = (
            SharedExperts(config, self.layout, mesh, **made)
            if config.num_shared_experts
            else None
        )

    def forward(
        self, x: Annotated[X, On("{self.layout.input}")], *, seq_len: int
    ) -> Annotated[X, On("{self.layout.output}")]:
        """(..., L, D) or (T, D) -> the same; Shard on tp with sequence parallelism, else
        Invariant.

        `seq_len` is the length of the sequence over all cp and tp ranks (for (T, D), the
        number of tokens); any length will do, and ranks may be left without tokens.
        """
        at, weigh = self.layout, not self.config.score_before_experts
        rows = self._token_rows(x, seq_len)
        # all-gather in C3, C5; convert in C4, C5 no SP
        entered_TD = _move(x.flatten(0, -2), at.input, at.entered, rows)
        # convert in C2
        x_TD = _move(entered_TD, at.entered, at.tokens, rows)
        routing = self.kept(self.router(x_TD), x, seq_len)
        # all-to-all over ep in C1, C2, C5, C5 no SP
        sent = self.dispatcher.dispatch(x_TD, routing)
        with self.dispatcher.on_expert_mesh():
            rows_MD = self.experts(sent.rows_MD, sent.counts_G, sent.counts_list)
        plan = sent.plan
        del sent  # its rows are as much memory as those that the experts computed
        # The shared experts run while the rows of the routed ones are on their way back.
        # all-to-all over ep in C1, C2, C5, C5 no SP
        returning = self.dispatcher.collect_start(rows_MD, plan)
        shared_TD = None
        if self.shared_experts is not None:
            # all-gather in C1; convert in C2
            shared_TD = _move(entered_TD, at.entered, at.shared_input, rows)
            shared_TD = self.shared_experts(shared_TD)
            # reduce-scatter in C1
            shared_TD = _move(shared_TD, at.shared_output, at.added, rows)
        if shared_TD is not None and self._adds_in_place():
            rows_ND, order_N = self.dispatcher.arrived(returning), plan.slots.order_N
            y_TD = combine_into(
                shared_TD, rows_ND, routing.gates_TK, order_N, at, weigh=weigh, keep=x
            )
        else:
            narrow, gates_TK = self.config.narrow_gates, routing.gates_TK
            if _is_read_by_nobody(x):
                rows_ND, inverse_N = (
                    self.dispatcher.arrived(returning),
                    plan.slots.inverse_N,
                )
                y_TD = combine_in_pieces(
                    rows_ND, inverse_N, gates_TK, at, weigh=weigh, narrow=narrow
                )
            else:
                rows_ND = self.dispatcher.collect_finish(returning)
                y_TD = combine(rows_ND, gates_TK, at, weigh=weigh, narrow=narrow)
            # convert in C2
            y_TD = _move(y_TD, at.combined, at.added, rows)
            y_TD = y_TD if shared_TD is None else y_TD + shared_TD
        # all-reduce in C2, C4, C5 no SP; reduce-scatter in C3, C5
        y_TD = _move(y_TD, at.added, at.output, rows)
        return y_TD.view_as(x)

    def _adds_in_place(self) -> bool:
        """Return whether rows are added into the output of the shared experts.

        In C2 the rows combine to Shard, while that output is Partial.
        """
        off = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        same = self.layout.combined == self.layout.added
        return self.config.combine_in_place and off and same

    def input_types(self, seq_len: int) -> Types:
        """Return the types of `x`, with all extents, for `assert_type(x, ...)`."""
        over_cp, over_tp = self._sequence(seq_len)
        extents = {"cp": over_cp, "tp": over_tp}
        return {
            axis: Shard(t.dim, extents.get(axis)) if isinstance(t, Shard) else t
            for axis, t in self.layout.input.items()
        }

    def _sequence(self, seq_len: int) -> tuple[Extent, Extent]:
        """Say how the sequence is cut over cp, and this rank's piece of it over tp."""
        place = {"cp": 0, **dense_mesh(self.parallel).coordinate}
        over_cp = Padded(seq_len).over(self.parallel.cp)
        return over_cp, Padded(over_cp.local_size(place["cp"])).over(self.parallel.tp)

    def _token_rows(self, x: Tensor, seq_len: int) -> Extent:
        """Say how the tokens of `x`, flattened, are cut over tp."""
        if x.dim() < 2:
            raise ValueError(
                f"x of shape {tuple(x.shape)} must have the dims (T, D) or (..., L, D): "
                "one token is x.unsqueeze(0), with seq_len=1"
            )
        over_cp, over_tp = self._sequence(seq_len)
        if self.parallel.equal_tokens:
            self._check_equal_tokens(seq_len, over_cp, over_tp)
        place = {"tp": 0, **dense_mesh(self.parallel).coordinate}
        cut = self.parallel.sequence_parallel
        length = over_tp.local_size(place["tp"]) if cut else over_tp.total
        if x.shape[-2] != length:
            raise ValueError(
                f"x of shape {tuple(x.shape)} must have {length} positions on this rank: "
                f"seq_len ({seq_len}) is cut over {self.parallel}"
            )
        batch = math.prod(x.shape[:-2])
        return Folded(batch, over_tp).over(self.parallel.tp)

    def _check_equal_tokens(self, seq_len: int, over_cp: Extent, over_tp: Extent) -> None:
        """Refuse a length of which ranks of ep would get unequal pieces.

        The batch may differ over dp, which no rank knows: there the dispatcher claims it by
        a type, which `verify()` compares.
        """
        cut_over_tp = self.parallel.etp == 1
        if not over_cp.equal_sizes or (cut_over_tp and not over_tp.equal_sizes):
            raise ValueError(
                f"equal_tokens promises that all ranks have equally many tokens, but "
                f"seq_len ({seq_len}) is cut unequally over cp ({self.parallel.cp}) and tp "
                f"({self.parallel.tp}): pad the sequence, or leave equal_tokens out"
            )


@typed
def _move(
    x_TD: Annotated[TD, On("{src}")], src: Types, dst: Types, rows: Extent
) -> Annotated[OtherTD, On("{dst}")]:
    """Take `x_TD` from one row of the table to another, by one collective or cast on tp."""
    if not has_axis(current_mesh() or ONE_DEVICE, "tp"):
        return x_TD
    return redistribute(x_TD, "tp", src=_cut(src, rows), dst=_cut(dst, rows))


def _cut(types: Types, rows: Extent) -> AxisType:
    return Shard(0, rows) if isinstance(types["tp"], Shard) else types["tp"]


def _is_read_by_nobody(x: Tensor) -> bool:
    """Return whether steps in between may be left out: no gradient or check reads them."""
    is_read = torch.is_grad_enabled() or type_of(x) is not None
    return is_plain_cpu(x) and not is_read
