"""What the tables of `spmd-moe check` mean: a paragraph each, wrapped where it is shown."""

CROSSINGS = (
    "R|P is the type and that of the gradient where it differs, - where there is none; <- "
    "is in backward. Where global is - every rank has rows of its own. Bytes are what rank "
    "0 hands to the collective, with all-to-alls as balanced routing makes them."
)

GRADIENT_SUMS = (
    "Sums of gradients carry one number more for each gradient: on how many ranks there is "
    "one."
)

MESHES = (
    "memory: what one rank keeps for this layer: weights, as much for gradients, AdamW "
    "(two tensors like each weight, as torch.optim.AdamW has them), activ. (what autograd "
    "keeps from forward to backward). Weights are whole on dp and cp (no FSDP). forward, "
    "backward, reduce (of gradients): bytes that one rank puts on the wire, by rings: "
    "all-reduce 2(n-1)/n of its tensor, reduce-scatter and all-to-all (n-1)/n, all-gather "
    "n-1 times its piece. Routing is taken as balanced."
)
