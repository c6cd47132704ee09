"""The command `spmd-moe`: check a layer, train with it, show the bugs that types refuse.

`README.md` is the map.
"""
