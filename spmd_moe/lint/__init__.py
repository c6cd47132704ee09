"""Finds the ad-hoc distributed patterns of the migration guide in Python source.

`README.md` is the map.
"""
