"""The rows of the table of ops, by kind; `ops.py` puts them together."""
