"""Make one change to the tables or functions of `placements`, and undo it.

A table is imported by name in several modules, so a new object is put wherever the old
one stands. What was found with the old tables (`op_lookup.KNOWN`, and with it everything
that was inferred by its calls) is forgotten before and after.
"""

import inspect
import sys
import textwrap
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any

from placements.checker.lookup import KNOWN
from placements.runtime.mesh import NO_MESH
from placements.types import mesh

PACKAGES = ("placements", "tests")


class Patches:
    """Changes that are undone, the latest first, when the stack closes."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack

    def item(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        """One entry of a dict."""
        self.stack.callback(table.__setitem__, key, table[key])
        table[key] = value

    def without(self, table: dict[Any, Any], key: Any) -> None:
        """One entry of a dict taken away; the order of the others stays."""
        before = dict(table)
        self.stack.callback(lambda: (table.clear(), table.update(before)))
        del table[key]

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """One attribute of a module or class."""
        self.stack.callback(setattr, owner, name, vars(owner)[name])
        setattr(owner, name, value)

    def everywhere(self, old: Any, new: Any) -> None:
        """Every module-level name, and entry of a dict there, that stands for `old`."""
        modules = [
            m for name, m in sys.modules.items() if name.partition(".")[0] in PACKAGES
        ]
        assert self.replaced(modules, old, new), f"{old!r} stands nowhere"

    def replaced(self, modules: Iterable[Any], old: Any, new: Any) -> int:
        """As `everywhere`, in these modules alone; how many names there were."""
        found = 0
        for module in modules:
            for name, value in list(vars(module).items()):
                if value is old:
                    self.attribute(module, name, new)
                    found += 1
                elif isinstance(value, dict):
                    for key in [k for k, one in value.items() if one is old]:
                        self.item(value, key, new)
        return found

    def text(self, owner: Any, name: str, old: str, new: str) -> None:
        """A function or method whose source says `new` where it said `old`."""
        function = inspect.getattr_static(owner, name)
        plain = function.fget if isinstance(function, property) else function
        source = textwrap.dedent(inspect.getsource(plain))
        if source.count(old) != 1:
            raise LookupError(f"{owner.__name__}.{name} does not say {old!r} once")
        made: dict[str, Any] = {}
        code = compile(source.replace(old, new), f"<mutant of {name}>", "exec")
        exec(code, plain.__globals__, made)
        if inspect.ismodule(owner):
            self.everywhere(function, made[name])
        else:
            self.attribute(owner, name, made[name])


def forget() -> None:
    """Drop all that was inferred so far: calls are compared by identity."""
    KNOWN.clear()
    NO_MESH.inferred.clear()
    mesh._mesh_of_sizes.cache_clear()


@contextmanager
def changed(change: Callable[[Patches], None]) -> Generator[None]:
    """The change holds inside the `with` block."""
    with ExitStack() as stack:
        stack.callback(forget)
        forget()
        change(Patches(stack))
        yield
