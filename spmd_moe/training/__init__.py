"""A small language model with the MoE layer, trained on any mesh to the same losses.

`README.md` is the map. Nothing of `spmd_moe` imports this package but `spmd-moe train`.
"""
