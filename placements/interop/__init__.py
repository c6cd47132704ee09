"""Other engines for the same types: `spmd_types` and DTensor, and how they compare.

README.md is the map. Nothing is imported here: `placements` itself needs no peer.
"""
