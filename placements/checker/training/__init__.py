"""Training code of torch: what its optimizers do."""
