"""The rules: a table. `docs/lint.md` is made from it.

`<x>` in the replacements stands for what a finding is about.
"""

import ast

from spmd_moe.lint.patterns import (
    averages,
    collectives,
    dtensors,
    gradients,
    indices,
    state,
)
from spmd_moe.lint.rule import Rule

_COLLECTIVE = r"all_?reduce|all_gather|reduce_scatter|broadcast|\breduce\("

RULES: tuple[Rule, ...] = (
    Rule(
        "to-local",
        "to_local() without grad_placements declares that the gradient of a replicated "
        "tensor is complete on every rank; where ranks use it differently, each keeps one "
        "summand of the gradient.",
        'convert(<x>, axis, src=I, dst=R) where ranks use it differently; nothing where '
        "all repeat the same",
        "spmd.convert(<x>, axis, src=spmd.I, dst=spmd.R)",
        "local_tensors",
        r"\.to_local\(",
        (ast.Call,),
        dtensors.left,
    ),
    Rule(
        "full-tensor",
        "full_tensor() without grad_placements declares that the gradient of the gathered "
        "tensor is complete on every rank, and hands each rank its piece of its own.",
        "all_gather(<x>, axis, src=S(dim), dst=R), or dst=I where all ranks go on alike",
        "spmd.all_gather(<x>, axis, src=spmd.S(dim), dst=spmd.R)",
        "local_tensors",
        r"\.full_tensor\(",
        (ast.Call,),
        dtensors.gathered,
    ),
    Rule(
        "from-local",
        "DTensor.from_local without shape and stride takes the size of this rank's piece "
        "times the number of ranks for the global size, which is wrong for uneven pieces.",
        "assert_type(<x>, {axis: S(dim, Padded(size))}): the extent says how it is cut",
        "spmd.assert_type(<x>, {axis: spmd.V}), and the sizes as values of your own",
        "uneven_sequences",
        r"from_local\(",
        (ast.Call,),
        dtensors.entered,
    ),
    Rule(
        "local-map",
        "local_map without in_grad_placements takes the gradient of each argument for "
        "placed as the argument; that of a replicated one is then not summed.",
        "region(fn, ins=[...], outs=..., grads=[...]), or @typed on the function itself",
        "spmd.local_map(in_types=..., out_types=...), or spmd.assert_type inside",
        "local_map",
        r"\blocal_map\b",
        (ast.Call,),
        dtensors.mapped,
    ),
    Rule(
        "scatter",
        "A scatter in place into a DTensor fails or moves data where a token "
        "dim is shorter "
        "than the axis, and the result may be placed otherwise than its operand.",
        "the same scatter on plain tensors: <x> is S(dim), which typecheck() follows",
        "the same scatter on plain tensors, inside spmd.local_map if it is global",
        "scatter",
        r"scatter|index_(?:add|copy|fill|put)_|put_\(|DTensor",
        (ast.Call, ast.Assign),
        dtensors.written_into,
    ),
    Rule(
        "raw-collective",
        "torch.distributed collectives are not differentiated: the gradient of what they "
        "send is lost, or counts as that of this rank alone.",
        "all_reduce(<x>, axis, src=P, dst=I), all_gather(<x>, axis, src=S(dim), dst=R), "
        "reduce_scatter(<x>, axis, src=P, dst=S(dim)); detach() what needs no gradient",
        "spmd.all_reduce(<x>, axis, src=spmd.P, dst=spmd.I) and the like",
        "column_row_parallel",
        _COLLECTIVE,
        (ast.Call,),
        collectives.raw,
    ),
    Rule(
        "raw-all-to-all",
        "torch.distributed.all_to_all is not differentiated: the ranks that sent the rows "
        "get no gradient for them.",
        "all_to_all(<x>, axis, src=V, dst=V, input_split_sizes=..., "
        "output_split_sizes=...)",
        "spmd.all_to_all(<x>, axis, src=spmd.V, dst=spmd.V, ...)",
        "dispatch_combine",
        r"all_to_all",
        (ast.Call,),
        collectives.raw_exchange,
    ),
    Rule(
        "fixed-backward",
        "The backward of this collective sums the gradients of all ranks, "
        "which is too much "
        "by the number of ranks where all of them go on to the same loss.",
        "the collective with its result named: dst=R if ranks go on differently, dst=I if "
        "they all repeat the same",
        "spmd.all_reduce or spmd.all_gather of <x>, with dst=spmd.R or dst=spmd.I",
        "column_row_parallel",
        r"functional_collectives|distributed\.nn|funcol",
        (ast.Call,),
        collectives.fixed_backward,
    ),
    Rule(
        "added-first",
        "A bias or another whole tensor is added to summands before they are summed, so it "
        "counts once for each rank.",
        "all_reduce(..., axis, src=P, dst=I) first, then add; or convert(bias, "
        "axis, src=R, "
        "dst=P)",
        "spmd.all_reduce(..., axis, src=spmd.P, dst=spmd.I) first, then add",
        "column_row_parallel",
        r"all_?reduce|reduce_scatter",
        (ast.Call,),
        collectives.added_first,
    ),
    Rule(
        "divided-bias",
        "A bias is divided by the number of ranks so that their sum makes it whole: the "
        "number comes from elsewhere, and was 1 where it should have been tp.",
        "convert(<x>, axis, src=R, dst=P)",
        "spmd.convert(<x>, axis, src=spmd.R, dst=spmd.P)",
        "expert_tensor_parallel",
        r"bias",
        (ast.BinOp,),
        averages.divided_bias,
    ),
    Rule(
        "masked-vocabulary",
        "A vocabulary-parallel lookup by hand: the bounds, the mask and the sum must agree "
        "on who holds which rows, and nothing checks that they do.",
        "an index with a domain: to_local(<x>, axis, Padded(size)), then all_reduce(..., "
        "src=P, dst=I)",
        "spmd.reinterpret(..., axis, src=spmd.V, dst=spmd.P), then spmd.all_reduce",
        "vocabulary_parallel",
        r"vocab|rank",
        (ast.BinOp,),
        indices.masked_vocabulary,
    ),
    Rule(
        "rank-arithmetic",
        "The rows of a rank are computed from its number, which is right only "
        "if the tensor "
        "is cut evenly along one dim over just that group.",
        "to_global(<x>, axis, extent) for numbers of rows; convert(<x>, axis, src=R, "
        "dst=S(dim)) for the rows, or split(<x>, types, mesh)[rank] where data are loaded",
        "spmd.convert(<x>, axis, src=spmd.R, dst=spmd.S(dim)) for the rows",
        "token_indices",
        r"rank",
        (ast.BinOp, ast.AugAssign, ast.Subscript),
        indices.by_rank,
    ),
    Rule(
        "even-sizes",
        "The rows of all ranks are taken for as many as this rank has, times the number of "
        "ranks; with uneven pieces ranks disagree, and collectives hang or mix up rows.",
        "global_size(x, dim), or a collective that reads the extent from the type of x",
        "sizes from an all_gather of x.shape[0], handed to the collective as split sizes",
        "uneven_sequences",
        r"world_size|_size|\.size\(\)|_degree|rank",
        (ast.Call, ast.BinOp),
        indices.even,
    ),
    Rule(
        "early-return",
        "A rank without rows returns before a collective that the others enter: they wait "
        "for it in forward or, if the collective is skipped in the graph, in backward.",
        "run the same calls with zero rows; all collectives here take them",
        "run the same calls with zero rows; spmd.all_to_all takes sizes of zero",
        "dispatch_combine",
        r"all_to_all|all_gather|reduce_scatter|all_reduce",
        (ast.If,),
        collectives.leaves_early,
    ),
    Rule(
        "counts",
        "Tokens for each expert are summed over an axis that is chosen by hand: with "
        "experts over ep, tp ranks count other tokens, without it they count the same.",
        "all_reduce(<x>, axis, src=P, dst=R) for each axis that the type has Partial",
        "spmd.all_reduce(<x>, axis, src=spmd.P, dst=spmd.R)",
        "counts_and_bias",
        r"expert|counts",
        (ast.Call,),
        collectives.counts,
    ),
    Rule(
        "replaced-buffer",
        "A buffer is replaced by a new tensor, so that whoever holds the old "
        "one, such as a "
        "checkpoint, never sees a change.",
        "<x>.add_(...) in place, with <x> declared R so that only equal values are added",
        "<x>.add_(...) in place",
        "counts_and_bias",
        r"register_buffer|expert_bias",
        (ast.Assign,),
        state.replaced,
    ),
    Rule(
        "average",
        "An average over ranks weighs ranks and not tokens, and a gradient that was summed "
        "over ep already must not be divided by another number of ranks.",
        "global_mean(total, count, axes) for a loss; a sum of gradients, reduce_gradients",
        "spmd.all_reduce of the total and of the count, then one division",
        "loss_averaging",
        r"AVG|avg|all_?reduce|reduce_scatter|\.grad\b",
        (ast.Call, ast.BinOp, ast.AugAssign),
        averages.averaged,
    ),
    Rule(
        "local-mean",
        "Each rank divides by its own count before the sum over ranks, so tokens of a rank "
        "with few valid ones count more.",
        "global_mean(total, count, axes): one sum of totals over one sum of counts",
        "spmd.all_reduce of the total and of the count, then one division",
        "loss_averaging",
        r"all_?reduce|from_local",
        (ast.Call,),
        averages.local_mean,
    ),
    Rule(
        "reducing-hook",
        "A hook on a gradient communicates: nothing says over which axes the gradient is "
        "still a sum, and a second reduction or a missing one goes unseen.",
        'declare(model, {...}), and reduce_gradients(model) once after backward',
        "spmd.convert(<x>, axis, src=spmd.I, dst=spmd.R) where the weight is used",
        "replicated_weights",
        r"register_\w*hook",
        (ast.Call,),
        gradients.hooked,
    ),
    Rule(
        "reduced-by-hand",
        "Gradients are reduced by hand, over a group that does not come from how their "
        "parameters lie on the mesh.",
        "declare(model, {...}), and reduce_gradients(model) once after backward",
        "spmd.convert of the weight where it is used, src=spmd.I, dst=spmd.R",
        "replicated_weights",
        r"\.grad\b",
        (ast.Call,),
        gradients.by_hand,
    ),
    Rule(
        "flag",
        "A flag on the parameter decides whether its gradient is reduced or counted; a "
        "parameter without the flag is left out, and nobody notices.",
        "declare(module, {name: types}): reductions, clipping and saving read the types",
        "spmd.assert_type(<x>, types) where it is used",
        "sequence_parallel_norms",
        r"sequence_parallel|tensor_model_parallel|allreduce|is_expert|expert_parallel"
        r"|is_moe_param|average_gradients",
        (ast.Call,),
        gradients.flagged,
    ),
    Rule(
        "clip",
        "This norm knows only of the gradients that it is given: pieces of "
        "experts on other "
        "ep ranks are missing in it, and copies may count twice.",
        "clip_grad_norm_(model, max_norm, meshes=...): counts each element once",
        "none: its words end before the gradient norm",
        "gradient_clipping",
        r"clip_grad_norm|get_total_norm",
        (ast.Call,),
        gradients.clipped,
    ),
    Rule(
        "divide-factor",
        "Gradients are divided by a factor that is set by hand: it must be that of the "
        "dense parameters for the experts too, and is ignored on a mesh of one rank.",
        "fully_shard(module, meshes=...) of placements: it sums, and the loss divides",
        "a factor of 1, and one division of the loss",
        "fsdp2_with_ep",
        r"divide_factor|fully_shard",
        (ast.Call,),
        averages.factor,
    ),
    Rule(
        "save",
        "The state of one rank is written as if it were that of the model: "
        "pieces under one "
        "name, of which one rank's survives.",
        "dcp.save(sharded_state_dict(model, optimizer, meshes=...))",
        "none: its words end before checkpoints",
        "checkpoints",
        r"torch\.save|import save|checkpoint",
        (ast.Call,),
        state.saved,
    ),
    Rule(
        "local-names",
        "Experts are named by their number on this rank, so that all ranks write the same "
        "names.",
        "one tensor of all experts with S(0) on ep, saved by sharded_state_dict",
        "none: its words end before checkpoints",
        "checkpoints",
        r"experts?",
        (ast.comprehension, ast.For),
        state.local_names,
    ),
)  # fmt: skip

BY_NAME = {rule.name: rule for rule in RULES}
