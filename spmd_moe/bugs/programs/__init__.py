"""The programs of the bugs: a file for each kind. `README.md` is the map."""
