"""Types in signatures, on tensors and on modules."""
