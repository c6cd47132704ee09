"""The type of a tensor: one AxisType for every mesh axis, and what goes with them.

Where several axes cut one dim, the order of the axes in the mapping is the order of the
cuts, outermost first: `{"dp": S(0), "tp": S(0)}` gives every dp rank a run of rows and
cuts that run over tp.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from placements.types.axis import AxisType, R, Shard, V, dual, print_types
from placements.types.extents import Extent
from placements.types.index import Computed, Cuts, Index
from placements.types.mesh import Mesh
from placements.types.padding import Pads
from placements.types.text import as_axis_type

# What a tensor holds that comes from factories alone (`TensorType.fresh`). ZERO and FILLED
# are one number in every element: a constant, which is equal on all ranks and has no
# gradient, so it fits any type on the axes that do not cut it (but only zero may be added
# to a Partial). EMPTY memory is Varying where its sizes do not cut it. What was
# MADE from fresh tensors has the type inferred. A LEAF needs a gradient, so it is no
# constant. All of them may still be declared, and take the type of what is first written
# to them.
ZERO, FILLED, EMPTY, MADE, LEAF = "zero", "filled", "empty", "made", "leaf"


class Identity:
    """Stands for a type in keys: the same object for equal types, as a rule.

    A type is hashed and compared by code of Python, and this by code of C.
    """

    __slots__ = ("facts", "form", "type")

    def __init__(self, of: "TensorType") -> None:
        self.type = of
        # What stands for all types that differ in sizes alone, and which sizes this one has
        # (`inference/templates.py`).
        self.form: tuple[Identity, tuple[Any, ...]] | None = None
        # What is known of the size of a dim, by dim (`checker/numbers.py`).
        self.facts: dict[int, Any] = {}


class TensorType(Mapping[str, AxisType]):
    """axis -> AxisType on one mesh; equal to a plain dict that says the same."""

    __slots__ = (
        "_hash", "by_axis", "cut_dims", "fresh", "has_plain_sizes", "identity", "index",
        "is_number", "mesh", "orders", "pads", "steady_identity", "types",
    )  # fmt: skip

    def __init__(
        self,
        mesh: Mesh,
        types: tuple[AxisType, ...],
        orders: tuple[tuple[int, tuple[str, ...]], ...] = (),
        index: Index | Computed | None = None,
        fresh: str | None = None,
        pads: tuple[Pads, ...] = (),
    ) -> None:
        self.mesh = mesh
        self.types = types
        # (dim, axes from the outermost cut) for dims that several axes cut
        self.orders = orders
        self.index = index
        self.fresh = fresh
        self.pads = pads
        # What inference asks for again and again, worked out once.
        self.by_axis = dict(zip(mesh.axes, types, strict=True))
        self.cut_dims: dict[int, tuple[str, ...]] = {}  # the axes, outermost first
        for axis, t in self.by_axis.items():
            if isinstance(t, Shard):
                self.cut_dims[t.dim] = (*self.cut_dims.get(t.dim, ()), axis)
        self.cut_dims.update(orders)
        # Whether the tensor is one number that a factory gave a shape.
        self.is_number = fresh in (ZERO, FILLED)
        # What stands for the type in keys, once somebody asked for it (`identity_of`). That
        # of a fresh type is not steady: the tensor may have been written since.
        self.identity: Identity | None = None
        # Equal types hash alike; that of a Shard is left to its letter and dim.
        cuts = tuple(self.cut_dims.items())
        letters = "".join([t.letter for t in types])
        # Whether all ranks have a tensor of the same sizes, all of whose rows are valid.
        self.has_plain_sizes = not pads and "S" not in letters and "V" not in letters
        self._hash = hash((mesh.key, letters, cuts, index, fresh, pads))

    def __getitem__(self, axis: str) -> AxisType:
        return self.by_axis[axis]

    def __len__(self) -> int:
        return len(self.types)

    def __iter__(self) -> Iterator[str]:
        axes = list(self.mesh.axes)
        for _, order in self.orders:
            places = sorted(axes.index(axis) for axis in order)
            for place, axis in zip(places, order, strict=True):
                axes[place] = axis
        return iter(axes)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, TensorType):
            return (
                self._hash == other._hash
                and self.types == other.types
                and self.orders == other.orders
                and self.mesh == other.mesh
                and self.index == other.index
                and self.fresh == other.fresh
                and self.pads == other.pads
            )
        if not isinstance(other, Mapping):
            return NotImplemented
        return self.says(cast(Mapping[str, object], other))

    def __reduce__(self) -> Any:
        said = self.mesh, self.types, self.orders, self.index, self.fresh, self.pads
        return TensorType, said

    def __deepcopy__(self, memo: object) -> "TensorType":
        return self  # nothing changes a type

    def __repr__(self) -> str:
        return print_types(self)

    def says(self, types: Mapping[str, object]) -> bool:
        """Return whether a plain mapping says the same; axes of size 1 do not count."""
        sizes = self.mesh.sizes
        said = {axis: t for axis, t in types.items() if sizes.get(axis, 2) > 1}
        if said.keys() != self.mesh.position.keys():
            return False
        if any(self[axis] != as_axis_type(t) for axis, t in said.items()):
            return False
        return all(
            [axis for axis in said if axis in order] == list(order)
            for _, order in self.orders
        )

    def is_cut_as(self, other: "TensorType") -> bool:
        """Return whether the same dims are cut over the same axes, into the same pieces."""
        dims = {*self.cut_dims, *other.cut_dims}
        return all(self.cuts(dim) == other.cuts(dim) for dim in dims)

    def cuts(self, dim: int) -> Cuts:
        """(axis, extent) of every cut of `dim`, outermost first."""
        found: list[tuple[str, Extent]] = []
        for axis in self.order(dim):
            shard = self[axis]
            assert isinstance(shard, Shard) and shard.extent is not None
            found.append((axis, shard.extent))
        return tuple(found)

    def first_sizes(self) -> list[int]:
        """Return how many rows of every cut the first rank holds."""
        shards = [t for t in self.types if isinstance(t, Shard)]
        return [t.extent.sizes[0] for t in shards if t.extent is not None]

    def order(self, dim: int) -> tuple[str, ...]:
        """Return the axes that cut `dim`, outermost first."""
        return self.cut_dims.get(dim, ())

    def global_size(self, dim: int, local_size: int) -> int:
        cuts = self.cuts(dim)
        return cuts[0][1].total if cuts else local_size

    def global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.global_size(dim, size) for dim, size in enumerate(shape))

    def is_also(self, axis: str, t: AxisType) -> bool:
        """Return whether the tensor may be called `t` on the axis, whatever its type is.

        One number in plain sizes is Replicate. Nothing flows back into it, so it is
        Invariant as well, and zeros on every rank are also summands of zeros.
        """
        if not self.is_number or self.by_axis[axis].letter != "R":
            return False
        return t.letter == "I" or (t.letter == "P" and self.fresh == ZERO)

    def with_index(self, index: Index | Computed | None) -> "TensorType":
        if index == self.index:
            return self
        return TensorType(self.mesh, self.types, self.orders, index, self.fresh, self.pads)

    def with_pads(self, pads: tuple[Pads, ...]) -> "TensorType":
        if pads == self.pads:
            return self
        return TensorType(self.mesh, self.types, self.orders, self.index, self.fresh, pads)

    def with_fresh(self, fresh: str | None) -> "TensorType":
        if fresh == self.fresh:
            return self
        return TensorType(self.mesh, self.types, self.orders, self.index, fresh, self.pads)

    def written(self) -> "TensorType":
        """Return the type of a tensor that is no longer fresh."""
        return self.with_fresh(None)

    def dual(self) -> "TensorType":
        """Return the type of the gradient."""
        types = tuple(dual(t) for t in self.types)
        pads = tuple(Pads(p.validity, p.dims) for p in self.pads)
        return TensorType(self.mesh, types, self.orders, pads=pads)


_MOST_TYPES = 4096  # that are kept on a mesh


def identity_of(found: TensorType) -> Identity:
    """Return what stands for the type, and all types that equal it, in keys."""
    identities = found.mesh.identities
    if len(identities) >= _MOST_TYPES:
        identities.clear()  # equal types may then have two, and be inferred twice
    # The sizes of pieces do not count in the hash of a type.
    key = (found, *found.first_sizes())
    identity = identities.get(key)
    if identity is None:
        identity = identities[key] = Identity(found)
    found.identity = identity
    if found.fresh is None:
        found.steady_identity = identity
    return identity


def one_of(found: TensorType) -> TensorType:
    """Return one object for all equal types, so that they are compared by identity."""
    one = identity_of(found).type
    if one is not found:
        identity_of(one)
    return one


def make(
    mesh: Mesh,
    types: Mapping[str, AxisType],
    index: Index | Computed | None = None,
    fresh: str | None = None,
) -> TensorType:
    """Make a TensorType of complete, bound AxisTypes; their order is that of the cuts."""
    by_dim: dict[int, list[str]] = {}
    for axis, t in types.items():
        if isinstance(t, Shard):
            by_dim.setdefault(t.dim, []).append(axis)
    orders = tuple(
        sorted((dim, tuple(axes)) for dim, axes in by_dim.items() if len(axes) > 1)
    )
    values = tuple(types[axis] for axis in mesh.axes)
    return TensorType(mesh, values, orders, index, fresh)


def from_factory(mesh: Mesh, fill: str) -> TensorType:
    """Return the type of a tensor fresh from a factory."""
    on_each_axis = V if fill == EMPTY else R
    return TensorType(mesh, (on_each_axis,) * len(mesh.axes), fresh=fill)
