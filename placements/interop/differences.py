"""Table: every known disagreement between our checker and a peer, with its reason.

A disagreement is about one step: the operands had the same types until there. A row says
which engines, who refuses, and how to recognise the case: the calls, the letters of src
and dst, what the peer says, or an edit of the operands after which we agree with the peer,
which shows that nothing else is different. Data only; `disagreements.py` matches it.
"""

from dataclasses import dataclass

LOCAL, GLOBAL, DTENSOR = "spmd_types local", "spmd_types global", "DTensor"
SPMD = (LOCAL, GLOBAL)

# who refuses
WE_REFUSE, THEY_REFUSE, OTHER_TYPE = "we refuse", "they refuse", "another type"
THEY_CRASH = "they crash"

STRICTER, THEIRS, OTHER_WORD, BUG, CRASH = (
    "ours stricter",
    "theirs stricter",
    "another word",
    "bug in the peer",
    "crash of the peer",
)

# Edits: what the peer takes the operands to be. Named here, made in disagreements.py.
FORGET_DIMS = "Shard is Varying"
NO_INVARIANT = "Invariant is Replicate"
TRUST_SRC = "the operand is what src says"
TRUST_SRC_FORGET_DIMS = "the operand is what src says, and Shard is Varying elsewhere"
MOVED_INNERMOST = "the axis that moves cuts innermost"
NO_EXTENTS = "pieces are equal, whatever their lengths"


@dataclass(frozen=True)
class Difference:
    """One row. Empty fields match anything."""

    key: str
    engines: tuple[str, ...]
    verdict: str
    kind: str
    why: str
    forms: str = ""  # templates or calls, separated by "; "; empty is any
    moves: str = ""  # "SV same": letters of src and dst of a move, or that they are one
    operand: str = ""  # a letter that some operand has
    says: str = ""  # a pattern in what the peer (or, if it accepts, ours) says
    edit: str = ""  # after this edit of the operands, ours says what the peer says


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "an assertion without a word", SPMD, THEY_CRASH, CRASH,
        "The cut from Replicate takes one row for each rank, and an assertion inside the "
        "peer fails where there are others: nothing is said of the program.",
        forms="convert; reinterpret; redistribute", says="^AssertionError$",
    ),
    Difference(
        "local mode knows no dims", (LOCAL,), WE_REFUSE, STRICTER,
        "Every Shard is a Varying there, so an op that works along a cut dim, or meets "
        "pieces with a whole, passes; each rank would compute with its piece as if it "
        "were all.",
        operand="S", edit=FORGET_DIMS,
    ),
    Difference(
        "local mode makes no Partial", (LOCAL,), OTHER_TYPE, STRICTER,
        "A sum or a contraction over a cut dim is Partial here at once; there it is "
        "Varying until somebody says otherwise.",
        operand="S", edit=FORGET_DIMS,
    ),
    Difference(
        "a reduction takes Varying", SPMD, WE_REFUSE, STRICTER,
        "There a reduction from Varying first calls the values summands, silently; that "
        "hides a bias that every rank added. Here `reinterpret(V -> P)` says it.",
        forms="all_reduce; reduce_scatter", moves="VR VI VS VV",
    ),
    Difference(
        "Shard and Varying are one", SPMD, WE_REFUSE, STRICTER,
        "There a call may go between Shard and Varying, as if they were one type. Here "
        "pieces of one tensor and unrelated values are two: `reinterpret` says that they "
        "are taken for each other.",
        forms="all_to_all; convert; redistribute", moves="SV VS",
    ),
    Difference(
        "src is taken on trust, global", (GLOBAL,), WE_REFUSE, STRICTER,
        "There Shard and Varying are one type to a collective, and Varying passes for "
        "Partial: src may name another dim than the one that is cut, or a sum that is "
        "not pending. Here src must be the type that the tensor has.",
        edit=TRUST_SRC,
    ),
    Difference(
        "src is taken on trust, local", (LOCAL,), WE_REFUSE, STRICTER,
        "As in global mode; and the cuts of other axes are not seen.",
        edit=TRUST_SRC_FORGET_DIMS,
    ),
    Difference(
        "dims are not renumbered", (GLOBAL,), OTHER_TYPE, BUG,
        "Between Varying and a type with a global value a dim comes or goes. The peer "
        "keeps the numbers of the dims that other axes cut, so its PartitionSpec names "
        "another dim, or one that does not exist.",
        moves="VR VI RV IV PV", operand="S",
    ),
    Difference(
        "a cut dim goes away", (GLOBAL,), WE_REFUSE, BUG,
        "The dim of one row per rank is cut by another axis. The peer takes a row of each "
        "piece, and its PartitionSpec still names the dim that is gone, or its old number.",
        moves="VR VI RV IV PV", operand="S",
    ),
    Difference(
        "Invariant does not mix", (DTENSOR,), WE_REFUSE, STRICTER,
        "DTensor has one word for Replicate and Invariant, so the reduction of the "
        "gradient that Invariant mixed with others would need is never asked for.",
        edit=NO_INVARIANT,
    ),
    Difference(
        "Invariant is reinterpreted", SPMD, WE_REFUSE, STRICTER,
        "There `reinterpret` takes Invariant to Varying or Partial, with an all-reduce "
        "in backward. Here `reinterpret` never communicates: `convert(I -> R)` is the "
        "visible call that does, and then `reinterpret`.",
        forms="reinterpret", moves="IV IP",
    ),
    Difference(
        "expert_mode", SPMD, THEY_REFUSE, THEIRS,
        "A flag unlocks casts that are rarely meant in a forward pass. Here every "
        "transition that is the backward of another can be written; its name says it.",
        says="requires expert_mode=True",
    ),
    Difference(
        "reinterpret of a Shard", SPMD, THEY_REFUSE, THEIRS,
        "Shard is no type of its own there, so there is nothing to reinterpret.",
        forms="reinterpret", says=r"reinterpret does not support S\(i\)",
    ),
    Difference(
        "flatten of a cut inner dim", (GLOBAL,), THEY_REFUSE, THEIRS,
        "Here the result has a Folded extent, with its rows known exactly.",
        forms="{a}.flatten(); {a}.flatten(0, 1)", says="_StridedShard",
    ),
    Difference(
        "flatten to a strided shard", (DTENSOR,), OTHER_TYPE, OTHER_WORD,
        "A private placement of DTensor for what is a Folded extent here.",
        forms="{a}.flatten(); {a}.flatten(0, 1)", says="_StridedShard",
    ),
    Difference(
        "global mode has no Varying", (GLOBAL,), THEY_REFUSE, THEIRS,
        "Every Varying axis must have a dim there. Here unrelated values are a type, so "
        "that a program may go on with them.",
        operand="V", says="no PartitionSpec entry",
    ),
    Difference(
        "Partial through a linear op", (*SPMD, DTENSOR), THEY_REFUSE, THEIRS,
        "Linear in what is pending the sum, the other operands being common to the "
        "ranks, so the parts still add up. The peers class the op as non-linear, count "
        "an index or a condition as a summand, or have no such strategy.",
        forms="linear({a}, {b}); linear({a}, {b}, {c}); matmul({a}, {b}); "
        "where({a} > 0.0, {b}, {c}); embedding({b}, {a}); {a}.gather({d}, {b}); "
        "{a}.index_select({d}, {b}); {a}.scatter_add({d}, {b}, {c}); {a}.clone(); "
        "{a}.cumsum({d}); {a}.mean({d}); {a}.flatten(); {a}.flatten(0, 1)",
        operand="P",
        says="Partial type on axis|Implicit redistribution|No valid sharding strategy",
    ),
    Difference(
        "Partial plus a contraction", SPMD, THEY_REFUSE, THEIRS,
        "A contraction over a cut dim is Partial at once here, so a Partial may be added "
        "to it in one op. There the product is Varying first.",
        forms="addmm({a}, {b}, {c}); linear({a}, {b}, {c})",
        operand="P", says="cannot combine with Varying",
    ),
    Difference(
        "no cast to Partial", (DTENSOR,), THEY_REFUSE, THEIRS,
        "DTensor keeps redistribution to Partial to itself; here it is the backward of a "
        "gather and may be written.",
        forms="convert; redistribute", moves="RP IP SP",
        says="internal use only|only Shard to Partial",  # torch 2.13, torch 2.15
    ),
    Difference(
        "lengths are not in the placement", (DTENSOR,), OTHER_TYPE, OTHER_WORD,
        "DTensor keeps the global size apart from the placement, so its Shard is any "
        "chunk; here the type tells unequal pieces from equal ones.",
        moves="RS IS PS SS", edit=NO_EXTENTS,
    ),
    Difference(
        "cuts in mesh order", (DTENSOR,), OTHER_TYPE, STRICTER,
        "Two axes cut one dim. DTensor moves rows until the cuts are in the order of the "
        "mesh, which takes more than the call says; here the new cut is the innermost.",
        operand="S", edit=MOVED_INNERMOST,
    ),
    Difference(
        "an outer cut is undone", (DTENSOR,), WE_REFUSE, STRICTER,
        "DTensor gathers over both axes and makes the inner cut again, behind one call. "
        "Here each is a visible call.",
        operand="S", edit=MOVED_INNERMOST,
    ),
    Difference(
        "other pending reductions", (DTENSOR,), WE_REFUSE, STRICTER,
        "DTensor has a Partial of maxima, of averages and of norms. Here Partial means "
        "sum, and a mean is a sum divided by the global count.",
        operand="S", says=r"Partial\((avg|max|min|product)\)|_NormPartial",
    ),
    Difference(
        "sizes in a view are global", (GLOBAL, DTENSOR), WE_REFUSE, STRICTER,
        "A size that a view names is that of the program on one device here, and torch "
        "runs the view on the rank's piece, so a view that does not cut both alike is "
        "refused. spmd_types takes the size for that of the piece; DTensor writes another "
        "size into the call.",
        forms="{a}.unflatten({d}, (2, -1)); {a}.unflatten({d}, (-1, 2))", operand="S",
        says="keeps the cut dim apart",
    ),
    Difference(
        "the same cut again", (*SPMD, DTENSOR), WE_REFUSE, STRICTER,
        "Nothing moves from a cut to the same cut; an all-to-all that does nothing is "
        "taken for a mistake here.",
        forms="all_to_all", moves="same",
    ),
    Difference(
        "an outer cut kept", (GLOBAL,), THEY_REFUSE, THEIRS,
        "A call from a cut to the same cut does nothing; the peer first asks that the cut "
        "be the innermost.",
        forms="redistribute; convert", moves="same", operand="S", says="not the innermost",
    ),
    Difference(
        "contiguous input", SPMD, THEY_REFUSE, THEIRS,
        "The peer leaves it to the caller to call contiguous().",
        says="must be contiguous",
    ),
    Difference(
        "all_to_all of Varying", SPMD, THEY_REFUSE, THEIRS,
        "There dim 0 has one row for each rank; here any multiple of the ranks, in equal "
        "runs, or split sizes.",
        forms="all_to_all", moves="VV", says="alltoall",
    ),
    Difference(
        "pieces of unequal length", SPMD, THEY_REFUSE, THEIRS,
        "Here the pieces are Padded, as torch.chunk cuts them; the peer needs a size that "
        "divides.",
        says="not evenly divisible|must be a multiple of group_size",
    ),
    Difference(
        "lengths are not tracked", (GLOBAL, LOCAL), OTHER_TYPE, BUG,
        "A cut of a dim that does not divide is accepted; a rank without rows then "
        "raises in forward, and the backward has the wrong shape on every rank. Here the "
        "type says Padded, and both directions are right.",
        moves="RS IS PS", edit=NO_EXTENTS,
    ),
)  # fmt: skip
