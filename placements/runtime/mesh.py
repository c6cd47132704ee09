"""The current mesh: what axis names refer to.

It belongs to a context, so every simulated rank has its own.
"""

import threading
from collections.abc import Iterable

from placements.runtime.scopes import HeldAtOnce, Scoped
from placements.types.mesh import Mesh, MeshLike, as_mesh, unknown_axis

NO_MESH = Mesh({})


def unknown_axis_here(mesh: Mesh, axes: Iterable[str]) -> str | None:
    """Say what is wrong with the first axis that neither `mesh` nor one around it has."""
    around = [m for m in said_meshes.all() if m is not None]
    return unknown_axis(mesh, axes, around)


def check_axes(where: str, mesh: Mesh | None, axes: Iterable[str]) -> None:
    """Raise ValueError for an axis that is not known."""
    wrong = None if mesh is None else unknown_axis_here(mesh, axes)
    if wrong is not None:
        raise ValueError(f"{where} {wrong}")


# What `set_current_mesh` was given: None where it was given None, or never called.
said_meshes: Scoped[Mesh | None] = Scoped("placements_mesh", None)


def current_mesh() -> Mesh | None:
    """Return the mesh that axis names refer to; None means one device."""
    said = said_meshes.get()
    return said if said is not None and said.sizes else None


def checked_mesh() -> Mesh:
    """Return the current mesh; one device if there is none."""
    said = said_meshes.get()
    return said if said is not None and said.sizes else NO_MESH


class _Sets(threading.local):
    """How many times this thread made a mesh current."""

    count = 0


sets = _Sets()


def has_mesh() -> bool:
    """Return whether a mesh is current, or the program said that there is one device."""
    return said_meshes.get() is not None


class set_current_mesh(HeldAtOnce["Mesh | None"]):  # noqa: N801 - reads as the verb it is
    """Make `mesh` the current one: at once, and until the `with` block ends.

    A mesh without axes, `{}`, says that there is one device. With None nothing is said.
    """

    of = said_meshes

    def __init__(self, mesh: "MeshLike | None") -> None:
        super().__init__(mesh)
        sets.count += mesh is not None

    @staticmethod
    def read(mesh: "MeshLike | None") -> Mesh | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None if mesh is None else as_mesh(mesh)
