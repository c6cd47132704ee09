"""Speed of the checks, as ratios measured in one run: `make bench`."""
