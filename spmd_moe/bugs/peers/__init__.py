"""Ask other checkers about the same bugs. `README.md` is the map."""
