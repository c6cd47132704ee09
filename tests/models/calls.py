"""How the models are called: the inputs of a global batch, and the class that takes them.

Every input has the batch as its first dim, so a rank's inputs are its rows of each.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.models.architectures import Architecture

BATCH = 8  # over all ranks
LENGTH = 7

Inputs = dict[str, Tensor]


class Way(NamedTuple):
    """How a family of models is called."""

    auto: str  # the Auto class of transformers that makes the model
    inputs: Callable[[torch.Generator], Inputs]


def _ids(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(3, 40, (BATCH, length), generator=generator)


def _floats(generator: torch.Generator, *sizes: int) -> Tensor:
    return torch.randn(BATCH, *sizes, generator=generator, dtype=torch.float64)


WAYS = {
    "decoder": Way("AutoModelForCausalLM", lambda g: {"input_ids": _ids(g)}),
    "encoder": Way("AutoModel", lambda g: {"input_ids": _ids(g)}),
    "encoder_decoder": Way(
        "AutoModelForSeq2SeqLM",
        lambda g: {"input_ids": _ids(g), "decoder_input_ids": _ids(g, 5)},
    ),
    "image": Way("AutoModel", lambda g: {"pixel_values": _floats(g, 3, 12, 12)}),
    "large_image": Way("AutoModel", lambda g: {"pixel_values": _floats(g, 3, 32, 32)}),
    "image_and_text": Way(
        "AutoModel",
        lambda g: {"input_ids": _ids(g), "pixel_values": _floats(g, 3, 12, 12)},
    ),
    "waveform": Way("AutoModel", lambda g: {"input_values": _floats(g, 60)}),
    "spectrum": Way("AutoModel", lambda g: {"input_values": _floats(g, 16, 8)}),
    "spectrogram": Way(
        "AutoModelForSpeechSeq2Seq",
        lambda g: {"input_features": _floats(g, 5, 16), "decoder_input_ids": _ids(g, 5)},
    ),
}


def inputs_of(architecture: Architecture) -> Inputs:
    """Return the inputs of the global batch, the same ones each time."""
    return WAYS[architecture.call].inputs(torch.Generator().manual_seed(1))


def model_of(architecture: Architecture, attention: str, is_training: bool) -> nn.Module:
    """Return the model with drawn weights that are the same each time.

    Each weight is moved away from its initial value: a bias of zeros, a scale of ones or a
    weight of 0.02 would hide what is done to it.
    """
    import transformers

    config = transformers.AutoConfig.for_model(architecture.type, **architecture.tiny)
    auto: Any = getattr(transformers, WAYS[architecture.call].auto)
    torch.manual_seed(0)
    model: nn.Module = auto.from_config(
        config, attn_implementation=attention, dtype=getattr(torch, architecture.dtype)
    )
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += (0.1 * noise).to(parameter.dtype)
    return model.train(is_training)


def output_of(result: Any) -> Tensor:
    """Return the main result of a model: its logits, or else its hidden states."""
    for name in ("logits", "last_hidden_state"):
        if getattr(result, name, None) is not None:
            return getattr(result, name)
    return result[0]
