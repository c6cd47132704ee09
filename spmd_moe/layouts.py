"""Table: what every tensor of the layer is on every mesh axis, in every configuration.

The code reads its types from here, the tests enumerate it, and `docs/layouts.md` is
generated from it. A cell is the type on one axis, `-` where the tensor's mesh has no such
axis. The gradient of a tensor has the dual type, so the table does not repeat it.

In every configuration the gradients of parameters are Partial on the axes where the
parameter is Replicate. Nothing inside the layer reduces them: they are summed once, over
exactly those axes, when the caller says `reduce_gradients(module, meshes=moe.meshes)`.
"""

from dataclasses import dataclass, fields
from functools import cache

from placements import AxisType, optional_axes, parse_axis_type
from spmd_moe.config import Parallel

Types = dict[str, AxisType]

# The axes of both meshes. Types name all of them; a mesh has those that are split.
optional_axes("dp", "cp", "tp", "edp", "ep", "etp")

# Columns: EP on or off, SP on or off, and EP with ETP.
CONFIGURATIONS: dict[str, str] = {
    "C1": "EP, SP",
    "C2": "EP",
    "C3": "SP; experts cut over tp",
    "C4": "experts cut over tp",
    "C5": "EP with ETP = TP, SP",
    "C5 no SP": "EP with ETP = TP",
}


@dataclass(frozen=True)
class Row:
    """One tensor. `tp`, `ep` and `etp` have a cell for each configuration, or none."""

    tensor: str
    meaning: str
    tp: str = ""
    ep: str = ""
    etp: str = ""
    dp: str = ""
    cp: str = ""  # as dp unless said
    edp: str = ""
    has_gradient: bool = True

    def __post_init__(self) -> None:
        for axis in ("tp", "ep", "etp"):
            cells = getattr(self, axis).split()
            assert len(cells) in (0, len(CONFIGURATIONS)), (self.tensor, axis, cells)


# fmt: off
TABLE: tuple[Row, ...] = (
    #                               C1    C2    C3    C4   C5    C5 no SP
    Row("input", "x as received: (B, L, D) or (T, D)",
        dp="S(0)", cp="S(-2)",  tp="S(-2) I     S(-2) I    S(-2) I"),
    Row("entered", "x_TD inside: all-gather in C3 and C5, convert in C4 and C5 no SP",
        dp="S(0)",              tp="S(0)  I     R     R    R     R"),
    Row("tokens", "x_TD of router and dispatch: a slice of its own in C2",
        dp="S(0)",              tp="S(0)  S(0)  R     R    R     R"),
    Row("w_gate_ED", "the router's weight; its gradient is summed over tp in all of them",
        dp="R",                 tp="R     R     R     R    R     R"),
    Row("routing", "logits_TE, scores_TE, gates_TK",
        dp="S(0)",              tp="S(0)  S(0)  R     R    R     R"),
    Row("expert_ids", "expert_ids_TK and the routing map",
        dp="S(0)",              tp="S(0)  S(0)  R     R    R     R", has_gradient=False),
    Row("counts_E", "tokens per expert; what is Partial is summed for the bias",
        dp="P",                 tp="P     P     R     R    R     R", has_gradient=False),
    Row("expert_bias_E", "changes which experts are chosen, not the gates",
        dp="R",                 tp="R     R     R     R    R     R", has_gradient=False),
    #                               C1    C2    C3    C4   C5    C5 no SP
    Row("slots", "rows_ND, sorted by expert",
        dp="V",                 tp="V     V     R     R    R     R"),
    Row("rows", "rows_MD that the experts see, after the all-to-all over ep",
        dp="V",                 tp="-     -     R     R    -     -",
        edp="V",                ep="V     V     -     -    V     V",
                               etp="R     R     -     -    R     R"),
    Row("w13_GFD", "w1_GFD and w3_GFD of the experts",
        dp="R",                 tp="-     -     S(1)  S(1) -     -",
        edp="R",                ep="S(0)  S(0)  -     -    S(0)  S(0)",
                               etp="R     R     -     -    S(1)  S(1)"),
    Row("w2_GDF", "w2_GDF of the experts",
        dp="R",                 tp="-     -     S(2)  S(2) -     -",
        edp="R",                ep="S(0)  S(0)  -     -    S(0)  S(0)",
                               etp="R     R     -     -    S(2)  S(2)"),
    Row("computed", "rows_MD that the experts return",
        dp="V",                 tp="-     -     P     P    -     -",
        edp="V",                ep="V     V     -     -    V     V",
                               etp="V     V     -     -    P     P"),
    #                               C1    C2    C3    C4   C5    C5 no SP
    Row("collected", "rows_ND back at their tokens' ranks, after the second all-to-all",
        dp="V",                 tp="V     V     P     P    P     P"),
    Row("combined", "y_TD: gates times rows, summed over the choices",
        dp="S(0)",              tp="S(0)  S(0)  P     P    P     P"),
    Row("shared_input", "x_TD of the shared experts: all-gather in C1, convert in C2",
        dp="S(0)",              tp="R     R     R     R    R     R"),
    Row("shared_w13_HD", "w1_HD and w3_HD of the shared experts",
        dp="R",                 tp="S(0)  S(0)  S(0)  S(0) S(0)  S(0)"),
    Row("shared_w2_DH", "w2_DH of the shared experts",
        dp="R",                 tp="S(1)  S(1)  S(1)  S(1) S(1)  S(1)"),
    Row("shared_output", "y_TD of the shared experts",
        dp="S(0)",              tp="P     P     P     P    P     P"),
    Row("added", "both terms of routed + shared; in C3 and C5 one reduce-scatter follows",
        dp="S(0)",              tp="S(0)  P     P     P    P     P"),
    Row("output", "y in the shape of the input",
        dp="S(0)", cp="S(-2)",  tp="S(-2) I     S(-2) I    S(-2) I"),
)
# fmt: on


@dataclass(frozen=True)
class Layout:
    """One column of the table: for each tensor a mapping axis -> type."""

    name: str
    input: Types
    entered: Types
    tokens: Types
    w_gate_ED: Types
    routing: Types
    expert_ids: Types
    counts_E: Types
    expert_bias_E: Types
    slots: Types
    rows: Types
    w13_GFD: Types
    w2_GDF: Types
    computed: Types
    collected: Types
    combined: Types
    shared_input: Types
    shared_w13_HD: Types
    shared_w2_DH: Types
    shared_output: Types
    added: Types
    output: Types


def configuration(parallel: Parallel) -> str:
    """Return the name of the column that these degrees belong to."""
    if parallel.ep == 1:
        return "C3" if parallel.sequence_parallel else "C4"
    if parallel.etp > 1:
        return "C5" if parallel.sequence_parallel else "C5 no SP"
    return "C1" if parallel.sequence_parallel else "C2"


@cache
def layout(name: str) -> Layout:
    """Return the column of that name."""
    if name not in CONFIGURATIONS:
        raise ValueError(f"configuration {name!r} must be one of {list(CONFIGURATIONS)}")
    return Layout(name, **{row.tensor: _types(row, name) for row in TABLE})


def _types(row: Row, name: str) -> Types:
    """Return the types of one tensor, axes in the order in which they cut a dim."""
    column = list(CONFIGURATIONS).index(name)
    found = {axis: getattr(row, axis).split() for axis in ("tp", "ep", "etp")}
    cells = {axis: cell[column] for axis, cell in found.items() if cell}
    dense = cells.get("tp", "-") != "-"
    every: dict[str, str] = (
        {"dp": row.dp, "cp": row.cp or row.dp, "tp": cells["tp"]}
        if dense
        else {"edp": row.edp, "ep": cells["ep"], "etp": cells["etp"]}
    )
    return {axis: parse_axis_type(text) for axis, text in every.items()}


assert [field.name for field in fields(Layout)][1:] == [row.tensor for row in TABLE]
