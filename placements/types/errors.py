"""The exception for a statement of the program that cannot be meant."""


class ArgumentError(ValueError, TypeError):
    """What a program says to a call of this package cannot be meant, whatever the tensors.

    It is raised where a checked call reads such a statement, and nowhere in inference: so
    it blames the program, while any other ValueError of a checked call may be a failure of
    the checker. It is both of the exceptions that Python has for a bad argument.
    """
