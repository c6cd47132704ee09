"""How a command tells of a failure: of the program that it checks, or of its own."""

CRASHED = 3  # the exit code if the checker itself failed


def told(error: Exception, *promised: type[Exception]) -> tuple[str, int]:
    """What to print of an error that ends a check, and the exit code.

    A verdict is a PlacementError, ranks that fell out of step, or what is `promised`.
    An UnsupportedTorchError, also one of a rank, is raised for `main` to tell.
    """
    from placements.testing.ranks.crashes import is_verdict  # imports the simulator: late
    from placements.testing.ranks.failures import RankFailure, told_once

    if not (is_verdict(error) or isinstance(error, promised)):
        return crash_text(error), CRASHED
    if isinstance(error, RankFailure):
        return told_once(error), 1
    return str(error) or repr(error), 1


def crash_text(error: Exception) -> str:
    from placements.testing.ranks.crashes import crash_of

    return f"{crash_of(error)}; --debug shows all"
