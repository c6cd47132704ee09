"""One step of training: the same code on a mesh and on one device."""

from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor

from placements import (
    Mesh,
    Shard,
    assert_type,
    clip_grad_norm_,
    fully_shard,
    reduce_gradients,
    set_current_mesh,
    split,
)
from placements.parameters.held import trained_parameters
from spmd_moe.balance import update_expert_bias
from spmd_moe.config import Parallel
from spmd_moe.layouts import Types
from spmd_moe.training.language_model import LanguageModel
from spmd_moe.training.recipe import DTYPES, Recipe
from spmd_moe.training.text import batch_of

MAX_NORM = 1.0


class Trainer:
    """A model and its optimizer. `dense` and `sparse` are meshes over the same ranks.

    With `fsdp` the ranks that share a parameter hold a shard of it each. `backend` is one
    of torch.compile: each block is then compiled, as one graph.
    """

    def __init__(
        self,
        recipe: Recipe,
        parallel: Parallel,
        dense: Mesh,
        sparse: Mesh,
        *,
        fsdp: bool = False,
        backend: str | None = None,
    ) -> None:
        self.recipe, self.meshes = recipe, (dense, sparse)
        with set_current_mesh(dense):
            self.model = LanguageModel(recipe, parallel, sparse).to(DTYPES[recipe.dtype])
            for block in (*self.model.blocks, self.model) if fsdp else ():
                fully_shard(block, meshes=self.meshes)
        if backend is not None:
            compiled = cast(Any, torch).compile
            for block in self.model.blocks:
                # The forward alone: FSDP2 gathers in hooks around it, which no graph has.
                block.forward = compiled(block.forward, fullgraph=True, backend=backend)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=recipe.lr)

    def step(self, number: int, checking: AbstractContextManager[Any]) -> float:
        """Run step `number` and return the loss of its batch before the step.

        Forward, backward and the sums over ranks run under `checking`, as written where it
        is a checking block; an optimizer keeps tensors without a type, so its step does
        not.
        """
        model, (dense, _) = self.model, self.meshes
        self.optimizer.zero_grad()
        with set_current_mesh(dense):
            ids_BL, targets_BL = (self._piece(ids) for ids in batch_of(self.recipe, number))
            with checking:
                assert_type(ids_BL, model.ids)
                assert_type(targets_BL, model.ids)
                with self._computing():
                    loss = model.loss(model(ids_BL), targets_BL)
                cast(Any, loss).backward()
                reduce_gradients(model, meshes=self.meshes)
                update_expert_bias(model)
            clip_grad_norm_(model, MAX_NORM, meshes=self.meshes)
            cast(Any, self.optimizer).step()
        return loss.item()

    def _computing(self) -> AbstractContextManager[Any]:
        """Compute in bfloat16 if the recipe says so: autocast chooses the ops."""
        is_low = self.recipe.dtype == "bfloat16"
        return torch.autocast("cpu", torch.bfloat16, enabled=is_low)

    def _piece(self, ids_BL: Tensor) -> Tensor:
        """Return what this rank holds of a global batch."""
        dense, _ = self.meshes
        here = dense.coordinates().index(dense.coordinate)
        return split(ids_BL, _bare(self.model.ids), dense)[here]

    def num_parameters(self) -> int:
        """Count the parameters of the global model."""
        held = trained_parameters("num_parameters", self.model, self.meshes)
        shapes = [one.type.global_shape(tuple(one.tensor.shape)) for one in held]
        return sum(torch.Size(shape).numel() for shape in shapes)


def _bare(types: Types) -> Types:
    """Leave out extents, which are those of this rank and not of all ranks."""
    return {a: Shard(t.dim) if isinstance(t, Shard) else t for a, t in types.items()}


def one_device(recipe: Recipe) -> Trainer:
    """Make the same training on one device, with which every mesh is compared."""
    alone = Parallel()
    dense, sparse = Mesh(alone.dense_mesh()), Mesh(alone.sparse_mesh())
    return Trainer(recipe, alone, dense, sparse)
