"""Tensor parallelism for a block of `transformers` that was written for one device.

Its code is not changed. `hold_pieces` says what each parameter is across ranks, `move_at`
which collectives run at the boundaries of attention and MLP. The block then runs on 2 x 2
ranks with every op checked, and the result and the gradient are those of one device.
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import placements
from placements import AxisType, I, P, R, S, assert_type, hold_pieces, move_at, typecheck
from placements.testing import device_mesh, run_ranks

MESH, TOKENS = {"dp": 2, "tp": 2}, 6


def llama_block() -> tuple[nn.Module, nn.Module]:
    """The block and its rotary embedding, with the same weights on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    config._attn_implementation = "sdpa"
    return LlamaDecoderLayer(config, 0).double(), LlamaRotaryEmbedding(config)


def tensor_parallel(block: nn.Module, stream: AxisType) -> None:
    """Cut a decoder block over `tp`; `stream` is the residual stream's type on that axis.

    Invariant: every rank repeats the norms of all tokens. Shard(1): sequence parallelism,
    each rank norms its own tokens; then the norms' weights are Replicate, their gradients
    are Partial, and `reduce_gradients` sums them over `tp`.
    """
    columns = dict.fromkeys(["*.[qkv]_proj.*", "*.gate_proj.*", "*.up_proj.*"], S(0))
    rows = dict.fromkeys(["*.o_proj.*", "*.down_proj.*"], S(1))
    types = {**columns, **rows, "*norm.weight": I if stream == I else R}
    hold_pieces(block, {name: {"dp": R, "tp": on_tp} for name, on_tp in types.items()})
    # I -> R sends nothing, and its backward is an all-reduce. S -> R is an all-gather.
    into, out_of = (stream, R), (P, stream)
    move_at(block.self_attn, "tp", before={"hidden_states": into}, after={0: out_of})
    move_at(block.mlp, "tp", before={"x": into}, after=out_of)


def on_ranks(x: Tensor, stream: AxisType) -> tuple[Tensor, Tensor]:
    """This rank's piece of the result, and of the gradient of x."""
    block, rotary = llama_block()
    types = {"dp": S(0), "tp": stream}
    with placements.set_current_mesh(device_mesh()):
        tensor_parallel(block, stream)
        hold_pieces(rotary, {"*": {"dp": R, "tp": R}})  # frequencies, whole on every rank
        own = placements.split(x, types, MESH)[torch.distributed.get_rank()]
        own.requires_grad_()
        with typecheck():
            assert_type(own, types)
            y = block(own, position_embeddings=rotary(own, torch.arange(TOKENS)[None]))
            y.square().sum().backward()
        placements.reduce_gradients(block)
    return y.detach(), own.grad


def main() -> None:
    x = torch.randn(4, TOKENS, 16, dtype=torch.float64, requires_grad=True)
    block, rotary = llama_block()
    y = block(x, position_embeddings=rotary(x, torch.arange(TOKENS)[None]))
    y.square().sum().backward()
    for words, stream in (("whole", I), ("cut over tp", S(1))):
        ranks = run_ranks(MESH, on_ranks, x.detach(), stream)
        types = {"dp": S(0), "tp": stream}
        result = placements.join([rank[0] for rank in ranks], types, MESH)
        gradient = placements.join([rank[1] for rank in ranks], types, MESH)
        off = max((result - y).abs().max().item(), (gradient - x.grad).abs().max().item())
        print(f"sequence {words}: the largest difference from one device is {off:.0e}")
        assert off < 1e-12


if __name__ == "__main__":
    main()
