"""The text that ships with the package, as bytes, and the batch of every step.

A batch is a function of the seed and the step and of nothing else. So all meshes see the
same batches, and where a run is in its data is the number of its step.
"""

import hashlib
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from spmd_moe.training.recipe import Recipe

VOCABULARY = 256  # bytes


def _bytes() -> bytes:
    return files("spmd_moe.training").joinpath("harbour.txt").read_bytes()


@cache
def text_ids() -> Tensor:
    """Return the whole text: one id, 0 to 255, for each byte."""
    return torch.tensor(list(_bytes()))


def text_digest() -> str:
    """Return a digest of the text: a run on another text must not be continued."""
    return hashlib.blake2b(_bytes(), digest_size=8).hexdigest()


def batch_of(recipe: Recipe, step: int) -> tuple[Tensor, Tensor]:
    """Return the global batch of a step: ids_BL, and the ids that follow them."""
    ids = text_ids()
    if recipe.seq_len >= len(ids):
        raise ValueError(
            f"seq_len ({recipe.seq_len}) must be below the {len(ids)} bytes of the text"
        )
    key = hashlib.blake2b(repr((recipe.seed, step)).encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
    starts_B = torch.randint(
        len(ids) - recipe.seq_len, (recipe.batch,), generator=generator
    )
    windows = ids[starts_B.unsqueeze(1) + torch.arange(recipe.seq_len + 1)]
    return windows[:, :-1], windows[:, 1:]
