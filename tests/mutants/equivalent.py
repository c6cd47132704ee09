"""Table: survivors that change nothing that can be observed, and why."""

# the beginning of a mutant's name -> why no law can tell it from the original
EQUIVALENT: dict[str, str] = {}


def why_equivalent(name: str) -> str | None:
    """The reason in words, if there is one."""
    return next((why for start, why in EQUIVALENT.items() if name.startswith(start)), None)
