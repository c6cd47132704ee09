"""Compute what `spmd-moe check --module` prints. `README.md` is the map."""
