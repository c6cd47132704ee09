"""A causal language model in which every tensor says what it is on every mesh axis.

    embedding -> [ attention -> MoE ] x layers -> norm -> head -> mean cross entropy

All of it follows from one type, that of the *stream*: the activations between the parts.
Sequences are cut over dp and the positions of a sequence over cp; over tp either the
positions are cut again (sequence parallelism) or all ranks repeat one computation. Besides
the letters of `spmd_moe/dims.py`:

    U  vocabulary     J  heads held here     A  channels of a head     C  channels, J * A
    X  positions of the whole sequence, as attention sees them
"""

from typing import Annotated, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import (
    cross_entropy,
    embedding,
    linear,
    rms_norm,
    scaled_dot_product_attention,
)

from placements import (
    Extent,
    I,
    Mesh,
    On,
    P,
    R,
    S,
    Shard,
    global_mean,
    redistribute,
    row_numbers,
    to_global,
    typed,
)
from spmd_moe.config import Parallel
from spmd_moe.layer import MoE
from spmd_moe.layouts import Types
from spmd_moe.meshes import dense_mesh
from spmd_moe.parameters import Initialised, Spec, fill_
from spmd_moe.training.recipe import Recipe
from spmd_moe.training.text import VOCABULARY

BLD: TypeAlias = Float[Tensor, "B L D"]
BLC: TypeAlias = Float[Tensor, "B L C"]
BLU: TypeAlias = Float[Tensor, "B L U"]
IdsBL: TypeAlias = Int[Tensor, "B L"]


def shared_by_tokens(stream: Types) -> Types:
    """Return the type of a weight that meets every token of the stream.

    Replicate where ranks have tokens of their own: its gradient is a sum over them.
    Invariant where they repeat one computation: its gradient is complete on each.
    """
    return {axis: R if isinstance(t, Shard) else I for axis, t in stream.items()}


def by_position(stream: Types) -> Types:
    """Return the type of a table with a row for each position: cut as the sequence is."""
    cut = {a: S(0, t.extent) if isinstance(t, Shard) else t for a, t in stream.items()}
    return {**cut, "dp": R}


def ids_of(stream: Types) -> Types:
    """Return the type of ids_BL whose embedding is the stream."""
    cut = {a: S(1, t.extent) if isinstance(t, Shard) else t for a, t in stream.items()}
    return {**cut, "dp": S(0)}


@typed
class Norm(Initialised):
    """Each token divided by its root mean square, times a weight."""

    w_D: Annotated[Float[Tensor, " D"], On("{self.weight}")]

    def __init__(self, dim: int, stream: Types) -> None:
        super().__init__()
        self.stream, self.weight = stream, shared_by_tokens(stream)
        self.w_D = nn.Parameter(torch.empty(dim))
        self.reset_own()

    def reset_own(self) -> None:
        fill_(self.w_D, 1)

    def forward(
        self, x_BLD: Annotated[BLD, On("{self.stream}")]
    ) -> Annotated[BLD, On("{self.stream}")]:
        """Communicates nothing."""
        return rms_norm(x_BLD, self.w_D.shape, self.w_D, eps=1e-6)


@typed
class Embedding(Initialised):
    """A row for each id and a row for each position."""

    w_UD: Annotated[Float[Tensor, "U D"], On("{self.weight}")]
    positions_LD: Annotated[Float[Tensor, "L D"], On("{self.rows}")]

    def __init__(self, recipe: Recipe, stream: Types, mesh: Mesh) -> None:
        super().__init__()
        self.ids, self.stream = ids_of(stream), stream
        self.weight, self.rows = shared_by_tokens(stream), by_position(stream)
        spec = Spec((VOCABULARY, recipe.dim), self.weight, mesh)
        self.declare_specs({"w_UD": spec}, recipe.seed)
        self.positions_LD = nn.Parameter(torch.empty(positions_here(recipe, stream, mesh)))
        self.reset_own()

    def reset_own(self) -> None:
        super().reset_own()
        fill_(self.positions_LD, 0)

    def forward(
        self, ids_BL: Annotated[IdsBL, On("{self.ids}")]
    ) -> Annotated[BLD, On("{self.stream}")]:
        """ids cut in some way -> the stream cut in that way. Communicates nothing."""
        return embedding(ids_BL, self.w_UD) + self.positions_LD


def positions_here(recipe: Recipe, stream: Types, mesh: Mesh) -> tuple[int, int]:
    """Return the shape of this rank's rows of a table by position."""
    length = recipe.seq_len
    for axis in ("cp", "tp"):
        t = stream[axis]
        if isinstance(t, Shard) and t.extent is not None:
            length = t.extent.local_size(mesh.coordinate.get(axis, 0))
    return length, recipe.dim


@typed
class Attention(Initialised):
    """Causal attention: heads cut over tp; positions see those of every cp rank."""

    wq_CD: Annotated[Float[Tensor, "C D"], On(dp=R, cp=R, tp=S(0))]
    wk_CD: Annotated[Float[Tensor, "C D"], On(dp=R, cp=R, tp=S(0))]
    wv_CD: Annotated[Float[Tensor, "C D"], On(dp=R, cp=R, tp=S(0))]
    wo_DC: Annotated[Float[Tensor, "D C"], On(dp=R, cp=R, tp=S(1))]

    def __init__(self, recipe: Recipe, stream: Types, mesh: Mesh, *, seed: int) -> None:
        super().__init__()
        self.stream, self.head_dim = stream, recipe.dim // recipe.heads
        square = (recipe.dim, recipe.dim)
        into = Spec(square, {"dp": R, "cp": R, "tp": S(0)}, mesh)
        out = Spec(square, {"dp": R, "cp": R, "tp": S(1)}, mesh)
        specs = {"wq_CD": into, "wk_CD": into, "wv_CD": into, "wo_DC": out}
        self.declare_specs(specs, seed)
        self.reset_own()

    def forward(
        self, x_BLD: Annotated[BLD, On("{self.stream}")]
    ) -> Annotated[BLD, On("{self.stream}")]:
        """The stream -> the stream.

        Communicates: into and out of the heads over tp; keys and values over cp.
        """
        at = self.stream
        x_BLD = redistribute(x_BLD, "tp", src=at["tp"], dst=R)  # every head, every token
        q_BLC = linear(x_BLD, self.wq_CD)
        k_BXC = redistribute(linear(x_BLD, self.wk_CD), "cp", src=at["cp"], dst=R)
        v_BXC = redistribute(linear(x_BLD, self.wv_CD), "cp", src=at["cp"], dst=R)
        y_BLC = self.attend(q_BLC, k_BXC, v_BXC)
        return redistribute(linear(y_BLC, self.wo_DC), "tp", src=P, dst=at["tp"])

    @typed
    def attend(
        self,
        q_BLC: Annotated[BLC, On(dp=S(0), cp=S(1), tp=S(2))],
        k_BXC: Annotated[Float[Tensor, "B X C"], On(dp=S(0), cp=R, tp=S(2))],
        v_BXC: Annotated[Float[Tensor, "B X C"], On(dp=S(0), cp=R, tp=S(2))],
    ) -> Annotated[BLC, On(dp=S(0), cp=S(1), tp=S(2))]:
        """Attend in each head, from each position to those up to it.

        Communicates nothing."""
        cut = self.stream["cp"]
        assert isinstance(cut, Shard) and cut.extent is not None
        q_BJLA, k_BJXA, v_BJXA = (
            torch.unflatten(x, 2, (-1, self.head_dim)).transpose(1, 2)
            for x in (q_BLC, k_BXC, v_BXC)
        )
        seen_LX = causal_mask(q_BLC, k_BXC, cut.extent)
        y_BJLA = scaled_dot_product_attention(q_BJLA, k_BJXA, v_BJXA, attn_mask=seen_LX)
        return y_BJLA.transpose(1, 2).flatten(2)


@typed
def causal_mask(
    q_BLC: BLC, k_BXC: Float[Tensor, "B X C"], over_cp: Extent
) -> Annotated[Bool[Tensor, "L X"], On(dp=R, cp=S(0), tp=R)]:
    """Say which positions each position of this rank sees: itself and those before it.

    Where in the sequence a rank's positions stand is read from the extent.
    """
    here_L = to_global(row_numbers(q_BLC, 1), "cp", over_cp)
    return row_numbers(k_BXC, 1) <= here_L.unsqueeze(1)


@typed
class TransformerBlock(Initialised):
    """x + attention(norm(x)), then x + moe(norm(x))."""

    def __init__(
        self, recipe: Recipe, stream: Types, mesh: Mesh, moe: MoE, *, seed: int
    ) -> None:
        super().__init__()
        self.seq_len, self.stream = recipe.seq_len, stream
        self.attention_norm = Norm(recipe.dim, stream)
        self.attention = Attention(recipe, stream, mesh, seed=seed)
        self.moe_norm = Norm(recipe.dim, stream)
        self.moe = moe

    def forward(
        self, x_BLD: Annotated[BLD, On("{self.stream}")]
    ) -> Annotated[BLD, On("{self.stream}")]:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD))
        return x_BLD + self.moe(self.moe_norm(x_BLD), seq_len=self.seq_len)


@typed
class LanguageModel(Initialised):
    """Bytes -> scores of the next byte. Make it and call it with the dense mesh current."""

    head_UD: Annotated[Float[Tensor, "U D"], On("{self.weight}")]

    def __init__(
        self, recipe: Recipe, parallel: Parallel, sparse_mesh: Mesh | None = None
    ) -> None:
        super().__init__()
        mesh = dense_mesh(parallel)
        config = recipe.moe_config()
        # A weight is drawn from its seed and name, so each layer has a seed of its own.
        seeds = [recipe.seed + 1_000_003 * layer for layer in range(recipe.layers)]
        layers = [
            MoE(config, parallel, sparse_mesh=sparse_mesh, seed=seed) for seed in seeds
        ]
        self.stream = layers[0].input_types(recipe.seq_len)
        self.weight, self.ids = shared_by_tokens(self.stream), ids_of(self.stream)
        self.tokens = recipe.batch * recipe.seq_len
        self.embedding = Embedding(recipe, self.stream, mesh)
        self.blocks = nn.Sequential(
            *(
                TransformerBlock(recipe, self.stream, mesh, moe, seed=seed)
                for moe, seed in zip(layers, seeds, strict=True)
            )
        )
        self.norm = Norm(recipe.dim, self.stream)
        spec = Spec((VOCABULARY, recipe.dim), self.weight, mesh)
        self.declare_specs({"head_UD": spec}, recipe.seed)
        self.reset_own()

    def forward(
        self, ids_BL: Annotated[IdsBL, On("{self.ids}")]
    ) -> Annotated[BLU, On("{self.stream}")]:
        x_BLD = self.blocks(self.embedding(ids_BL))
        return linear(self.norm(x_BLD), self.head_UD)

    @typed
    def loss(
        self,
        scores_BLU: Annotated[BLU, On("{self.stream}")],
        targets_BL: Annotated[IdsBL, On("{self.ids}")],
    ) -> Annotated[Float[Tensor, ""], On(dp=I, cp=I, tp=I)]:
        """Return the mean loss over all tokens of the batch, wherever they are.

        Communicates: all-reduce over every axis that cuts the stream.
        """
        total = cross_entropy(
            scores_BLU.flatten(0, 1), targets_BL.flatten(), reduction="sum"
        )
        cut = [axis for axis, t in self.stream.items() if isinstance(t, Shard)]
        return global_mean(total, self.tokens, cut)
