"""Compute what `spmd-moe check` prints, and print nothing. `README.md` is the map."""
