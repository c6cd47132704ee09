"""A small language model with the MoE layer, trained on any mesh to the same losses.

recipe          what is trained: sizes, seed, learning rate; nothing about ranks
text            the text that ships with the package; the batch of a step
language_model  embedding, causal attention, MoE, head: every tensor typed
trainer         one step: checked forward and backward, reduce, clip, update
checkpoints     sharded, loaded on any mesh; manifest: what they are of, and whole
world           the ranks of this run: torchrun's, Slurm's, or one process
launch          local processes by torch's launcher, and why they failed
job, loop       what a rank is told; what it does
lock            one run in a directory
losses, plot    the log of losses, their comparison; both curves as a picture
errors          input that cannot be used, and a rank that failed

Nothing of `spmd_moe` imports this package but the command `spmd-moe train`.
"""
