"""Tiny models of `transformers`, as other people wrote them, for the costs on real code."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from placements import R, S, assert_type, declare

WIDTH, HEADS, LENGTH = 32, 4, 16
AXES = {"dp": 4}

_SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": HEADS,
    "vocab_size": 128, "num_hidden_layers": 2,
}  # fmt: skip
_DECODER = {**_SIZES, "num_key_value_heads": 2, "attn_implementation": "eager"}


@dataclass(frozen=True)
class Model:
    """A module, and its arguments for a batch of that length."""

    name: str
    module: nn.Module
    arguments: Callable[[int], tuple[Tensor, ...]]

    def declared(self, length: int) -> tuple[Tensor, ...]:
        """The arguments, with the types of plain data parallelism on all tensors."""
        state = [*self.module.named_parameters(), *self.module.named_buffers()]
        declare(self.module, {name: {"dp": R} for name, _ in state})
        return self.typed(length)

    def typed(self, length: int) -> tuple[Tensor, ...]:
        """New arguments: a batch is cut over dp, what all rows share is Replicate."""
        arguments = self.arguments(length)
        for x in arguments:
            assert_type(x, {"dp": S(0) if x.shape[0] > 1 else R})
        return arguments


class Layers(nn.Module):
    """Layers of a decoder, one after the other, on embeddings."""

    def __init__(self, rotary: nn.Module, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.rotary = rotary
        self.layers = nn.ModuleList(layers)

    def forward(self, x_BLD: Tensor, positions_1L: Tensor) -> Tensor:
        angles = self.rotary(x_BLD, positions_1L)
        for layer in self.layers:
            made = layer(x_BLD, position_embeddings=angles, attention_mask=None)
            x_BLD = made[0] if isinstance(made, tuple) else made
        return x_BLD


def _embeddings(length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, length, WIDTH), torch.arange(length)[None]


def llama(num_layers: int = 2) -> Model:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import (
        LlamaDecoderLayer,
        LlamaRotaryEmbedding,
    )

    config = LlamaConfig(**_DECODER)
    layers = [LlamaDecoderLayer(config, k) for k in range(num_layers)]
    made = Layers(LlamaRotaryEmbedding(config), layers).eval()
    return Model("Llama, layers", made, _embeddings)


def qwen3_moe() -> Model:
    """The attention of Qwen3-MoE."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import (
        Qwen3MoeAttention,
        Qwen3MoeRotaryEmbedding,
    )

    config = Qwen3MoeConfig(**_DECODER, head_dim=8)
    layers = [Qwen3MoeAttention(config, k) for k in range(2)]
    made = Layers(Qwen3MoeRotaryEmbedding(config), layers).eval()
    return Model("Qwen3-MoE, attention", made, _embeddings)


def bert() -> Model:
    from transformers import BertConfig, BertModel

    made = BertModel(BertConfig(**_SIZES)).eval()
    return Model("BERT", made, lambda length: (torch.randint(0, 128, (2, length)),))


class _Counter(TorchFunctionMode):
    count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def functions_of(model: Model) -> int:
    """How many torch functions one forward calls."""
    arguments = model.arguments(LENGTH)
    with _Counter() as counter:
        model.module(*arguments)
    return counter.count
