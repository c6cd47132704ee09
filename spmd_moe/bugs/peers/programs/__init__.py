"""Bugs as a user of a peer would write them. `README.md` is the map."""
