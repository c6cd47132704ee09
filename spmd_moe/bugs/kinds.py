"""The kinds of the bugs."""

KINDS: dict[str, str] = {
    "C1": "gradient never reduced",
    "C2": "reduced twice, or scaled by a group size",
    "C3": "Partial misused",
    "C4": "auxiliary loss, counts, expert bias",
    "C5": "token, index or layout provenance",
    "C6": "uneven shards, padding, extents",
    "C7": "gradient dropped by a collective",
    "C8": "experts without tokens, lockstep",
    "C9": "wrong mesh or group, gradient norm",
    "C10": "normalisation of the loss",
    "C11": "random state",
    "C12": "dtype",
    "C13": "aliasing, buffers",
    "C14": "checkpoints of experts",
}
