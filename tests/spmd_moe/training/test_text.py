"""Batches depend on the seed and the step and on nothing else."""

from dataclasses import replace

import pytest
import torch

from spmd_moe.training.recipe import Recipe
from spmd_moe.training.text import VOCABULARY, batch_of, text_ids

RECIPE = Recipe(seq_len=9, batch=3)


def test_a_batch_is_text_and_what_follows_it() -> None:
    ids_BL, targets_BL = batch_of(RECIPE, 5)
    assert ids_BL.shape == targets_BL.shape == (3, 9)
    assert torch.equal(ids_BL[:, 1:], targets_BL[:, :-1])
    text = bytes(text_ids().tolist())
    for row in torch.cat([ids_BL, targets_BL[:, -1:]], dim=1):
        assert bytes(row.tolist()) in text


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    first = batch_of(RECIPE, 1)[0]
    assert torch.equal(first, batch_of(replace(RECIPE, lr=0.1, dim=64), 1)[0])
    assert not torch.equal(first, batch_of(RECIPE, 2)[0])
    assert not torch.equal(first, batch_of(replace(RECIPE, seed=1), 1)[0])


def test_the_whole_text_can_be_a_sequence_but_no_more() -> None:
    length = len(text_ids())
    assert 5_000 < length and int(text_ids().max()) < VOCABULARY
    batch_of(replace(RECIPE, seq_len=length - 1), 1)
    with pytest.raises(ValueError, match="must be below"):
        batch_of(replace(RECIPE, seq_len=length), 1)
