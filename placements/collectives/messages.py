"""Python objects as bytes, for other ranks: data of this package, and nothing that runs.

`pickle.loads` calls whatever a message names. Here a message may name records and errors of
this package and a few plain classes of Python, so a peer can send wrong values but no code.
"""

import builtins
import io
import pickle
from dataclasses import is_dataclass
from typing import Any, cast

# Of Python itself, besides what pickle knows without a name.
_PLAIN = {
    # A size or a rank that knows its axes is sent as the plain number.
    "builtins": ("frozenset", "set", "complex", "slice", "range", "int", "float"),
    "collections": ("Counter", "OrderedDict"),
}


def dumps(value: Any) -> bytes:
    return pickle.dumps(value)


def loads(message: bytes) -> Any:
    """Return what `dumps` was given; UnpicklingError for a message that names code."""
    return _Reader(io.BytesIO(message)).load()


class _Reader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name in _PLAIN.get(module_name, ()):
            return super().find_class(module_name, global_name)
        found: Any = None
        if module_name == "builtins":
            found = getattr(builtins, global_name, None)
            if isinstance(found, type) and issubclass(found, BaseException):
                return found
        elif module_name.startswith("placements.") and "." not in global_name:
            found = super().find_class(module_name, global_name)
            if getattr(found, "__module__", None) == module_name and _is_record(found):
                return found
        raise pickle.UnpicklingError(
            f"a message of another rank names {module_name}.{global_name}, which is no "
            "record of this package"
        )


def _is_record(found: Any) -> bool:
    if not isinstance(found, type):
        return False
    return issubclass(found, tuple | BaseException) or is_dataclass(cast(Any, found))
