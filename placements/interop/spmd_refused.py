"""Table: the names of `spmd_types` that `spmd.py` refuses on purpose, and its options.

docs/differences.md lists them. Data only.
"""

from collections.abc import Mapping

_IN_A_REGION = "wrap the call: placements.region(fn, ins=..., outs=..., grads=...)"
# Name -> why not, and what to write.
REFUSED: Mapping[str, tuple[str, str]] = {
    "mutate_type": (
        "a type that is overwritten is not checked, and views keep the old one",
        "make a new tensor: reinterpret(x, axis, src=..., dst=...), or a typed collective",
    ),
    "register_autograd_function": (
        "its hook computes types with the rules of spmd_types", _IN_A_REGION,
    ),
    "register_local_autograd_function": (
        "that a Function works element by element is a claim about values", _IN_A_REGION,
    ),
    "register_decomposition": (
        "types of one function would stand for the values of another",
        "register_op(name, like=...) for a custom op, or " + _IN_A_REGION,
    ),
    "register_no_typecheck": (
        "checking that goes off by the name of a function is seen at no call",
        "with no_typecheck(): ..., or " + _IN_A_REGION,
    ),
    "register_local_backward_hook": (
        "hooks are watched here as they run", "register the hook as it is",
    ),
    "local": (
        "names that exist already keep their types in a block",
        "@local_map(out_types=...) around a function: its arguments are this rank's own",
    ),
    "trace": ("a trace is kept by the ledger", "with placements.ledger() as record: ..."),
    "traceback_filtering": ("errors name the user's line already", "nothing"),
    "merge_types": ("a type is one mapping", "{**these, **those}"),
    "get_partition_spec": ("cuts are part of the type", "placements.type_of(x)"),
    "SpmdType": ("a type is a mapping of axes", '{"dp": S(0), "tp": R}'),
    "TensorSharding": ("cuts are part of the type", "placements.type_of(x)"),
    "DimSharding": ("cuts are part of the type", "placements.type_of(x)"),
    "normalize_axis": ("an axis is a name", "the name"),
    "normalize_mesh": ("a mesh is a DeviceMesh or sizes", "placements.as_mesh(mesh)"),
    "normalize_partition_spec": ("cuts are part of the type", "placements.type_of(x)"),
    "dtensor_placement_to_spmd_type": (
        "DTensor has one word for R and I",
        "placements.interop.dtensor.axis_type_of(placement, replicated=R)",
    ),
    "spmd_type_to_dtensor_placement": (
        "the words are in another file", "placements.interop.dtensor.placement_of(type)",
    ),
    "current_mesh_all_names": ("a mesh has its names", "placements.current_mesh().sizes"),
    "current_mesh_names": ("a mesh has its names", "placements.current_mesh().axes"),
    "Scalar": (
        "numbers that belong to ranks are known by themselves here",
        "placements.axis_rank(axis), placements.global_size(x, dim)",
    ),
    "MeshAxis": (
        "an axis is a name of the current mesh, so that a type can be read",
        "the name of the axis; one call for each axis in the place of a flattened group",
    ),
    "spmd_redistribute": ("it moves a DTensor", "redistribute(x, axis, src=..., dst=...)"),
    "set_dist": ("collectives are those of torch", "nothing"),
    "rules": ("they compute types of spmd_types", _IN_A_REGION),
}  # fmt: skip

# Options and ways to call, which are refused where they are used.
WAYS: Mapping[str, tuple[str, str]] = {
    "async_op=True": (
        "a tensor that is not there yet looks like one that is",
        "`all_to_all_start(...)`, and its `wait()`",
    ),
    "all_reduce(inplace=True)": (
        "the type of a tensor, and of its views, does not change in place",
        "use the result",
    ),
    'typecheck(strict_mode="permissive")': (
        "what has no type is not known to be right",
        "declare it, or keep it in a region or in `no_typecheck()`",
    ),
    "typecheck(local=...)": (
        "dims are followed and Varying is a type, so the two modes are one",
        "nothing: the argument is taken and does nothing",
    ),
    "set_current_mesh(local_axes=...)": (
        "values that are unrelated are V on the axis", "declare them V",
    ),
    "a declaration axis by axis": (
        "between two declarations a tensor would have half a type",
        "one `assert_type` that names every axis; later ones may name some",
    ),
    "a group flattened of several axes": (
        "a type is said on each axis", "one call for each axis",
    ),
    "all_reduce of a Varying": (
        "it hides what every rank added", "`reinterpret(x, axis, src=V, dst=P)` first",
    ),
}  # fmt: skip
