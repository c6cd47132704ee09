"""How the rows of experts are multiplied by their weights."""
