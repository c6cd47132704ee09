"""The page that `spmd-moe check --html` writes."""
