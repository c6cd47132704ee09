"""One matcher for each rule. `README.md` is the map."""
