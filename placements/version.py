"""The version of the project, which `pyproject.toml` reads from here."""

__version__ = "0.2.0"
