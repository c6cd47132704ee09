"""Table: every torch op that inference knows, and all its facts.

One row an op family: how it depends on its operands (linearity), where their dims go (a
flow), what each slot of a call is (`op.ROLES`), what happens along a dim that it looks
along (`along`: SUM if the partial results add up, so the result is Partial, or the reason
why it is refused), and what it does to zeros in rows of padding. Ops are found by their
torch name; an in-place form (`add_`) is found by the name of its plain one.
"""

from functools import partial

from placements.inference.flows import (
    elementwise,
    factories,
    indexing,
    losses,
    products,
    random,
    reductions,
    reshape,
    subscripts,
    views,
)
from placements.inference.op import SUM, Op, Row, parsed_slots
from placements.inference.padding import ABSORBS, FLIPS, KEEPS
from placements.inference.rules import LINEAR, MULTILINEAR, NO_VALUES, NONLINEAR
from placements.inference.table import arrangements, elements, matrices, networks

NEEDS_WHOLE = "it needs the whole dim, and this rank holds a piece of it"
NOT_MEAN = (
    "a mean over a dim that is cut divides by this rank's count; take the sum, which is "
    "Partial, and divide by the global count (global_mean)"
)
NOT_NORM = (
    "the norm of a piece is not the norm of all; placements.clip_grad_norm_ takes that of "
    "gradients over all ranks"
)
NOT_MAX = (
    "the largest of a piece is not the largest of all, and Partial means sum; gather the "
    "dim first"
)
NOT_SORTED = (
    "the order within a piece is not the order of the whole dim; take the order of the "
    "rank's own rows (argsort, which is Varying), or gather the dim first"
)
OWN_ORDER = "the order of a piece is that of the rank's own rows, and not of the whole dim"
OWN_ANSWER = "whether all or any of a piece are true is the answer of the rank's own rows"
OWN_COUNT = "whether a piece has none or all of something is the answer of its own rank"
NOT_SOFTMAX = "a softmax needs the whole dim: the sum of a piece is not that of all"
NOT_RUNNING = "a running result needs what came before on the other ranks"
NOT_SCATTERED = indexing.POSITIONS
SELECTED = "how many elements a mask selects of a piece only its rank knows"


ELEMENT = "each element by itself, but f(a + b) is not f(a) + f(b)"
VIEW = "the cut goes with its dim"
FRESH = "fresh numbers in a tensor's shape or place"
NUMBER = "one number in every place; in the sizes of a piece it is a piece"
SIZED = "size size; unread input; dtype dtype"  # new_zeros has an input
SHAPED = "size size/input; dtype dtype"  # a tensor stands for its shape
ZEROS, ONES = (partial(factories.full, fill_value=n) for n in (0, 1))
REDUCED = "value input; dim dim; flag keepdim; dtype dtype"

ROWS: tuple[Row, ...] = (
    Row("elementwise",
        "acos acosh atan2 bitwise_left_shift bitwise_right_shift "
        "clamp clamp_max clamp_min clip cos cosh erfc erfinv exp exp2 "
        "float_power fmax fmin fmod hardsigmoid "
        "hypot isclose isfinite isinf isnan isneginf isposinf "
        "leaky_relu lgamma log log10 log2 logaddexp logit log_sigmoid nan_to_num "
        "pow reciprocal remainder rsqrt sigmoid signbit sinc softplus sqrt threshold "
        "xlogy special_expit special_entr "
        "__lshift__ __rshift__ __rpow__ __mod__ __rmod__ __rfloordiv__",
        NONLINEAR, elementwise.pointwise, "value *", ELEMENT),
    Row("elementwise",
        "gt ge lt le eq ne greater greater_equal less less_equal not_equal __eq__",
        NONLINEAR, elementwise.compared, "value input other",
        f"{ELEMENT}; a count with zero or with the size of a piece, of the rank's own rows",
        forgets=OWN_COUNT),
    Row("elementwise", "floor_divide __floordiv__", NONLINEAR, elementwise.floor_divided,
        "value input other", ELEMENT),
    Row("elementwise",
        "abs absolute asin asinh atan atanh bitwise_or ceil celu elu erf expm1 floor frac "
        "gelu hardswish hardtanh log1p logical_or logical_xor bitwise_xor maximum minimum "
        "mish relu relu6 round selu sgn sign silu sin sinh softsign square tan tanh "
        "tanhshrink trunc __or__ __ror__ __xor__ __rxor__",
        NONLINEAR, elementwise.pointwise, "value *", f"{ELEMENT}; zeros stay zero",
        zeros=KEEPS),
    Row("elementwise", "bitwise_and logical_and __and__ __rand__",
        NONLINEAR, elementwise.pointwise, "value *", f"{ELEMENT}; zero wins",
        zeros=ABSORBS),
    Row("elementwise", "bitwise_not logical_not __invert__",
        NONLINEAR, elementwise.pointwise, "value *", f"{ELEMENT}; False becomes True",
        zeros=FLIPS),
    Row("sums", "add sub subtract rsub __rsub__ __radd__", LINEAR, elementwise.added,
        "value input other; flag alpha",
        "a sum of sums is a sum; every term must be pending it"),
    Row("products", "mul multiply __rmul__", MULTILINEAR, elementwise.multiplied,
        "value input other",
        "linear in one factor when the others are given"),
    Row("quotients", "div divide true_divide", LINEAR, elementwise.quotient,
        "value input; control other; flag rounding_mode",
        "linear in the numerator; the divisor must not be pending a sum"),
    Row("products", "addcmul", MULTILINEAR, elementwise.product_added,
        "value input tensor1 tensor2; control value",
        "a product, and a term of a sum"),
    Row("quotients", "addcdiv", LINEAR, elementwise.quotient_added,
        "value input tensor1; control tensor2 value",
        "a quotient, and a term of a sum"),
    Row("quotients", "lerp", LINEAR, elementwise.lerp,
        "value input end; control weight",
        "linear in both ends; the weight must not be pending a sum"),
    Row("quotients", "__rtruediv__ __rdiv__", NONLINEAR, elementwise.pointwise,
        "value input other",
        "a number divided by a sum is not the sum of the quotients"),
    Row("signs", "neg negative", LINEAR, elementwise.each, "value input", "linear"),
    Row("signs", "positive", LINEAR, elementwise.same, "value input", "the same values"),
    Row("choosing elements", "where", LINEAR, elementwise.where,
        "control condition; value input other",
        "linear in both branches; the condition must be common to the ranks of a sum; "
        "alone, as nonzero", forgets=SELECTED),
    Row("choosing elements", "masked_fill", LINEAR, elementwise.masked_fill,
        "value input value; control mask",
        "linear if the fill is zero; the mask must be common to the ranks of a sum"),
    Row("copies and casts",
        "clone contiguous detach data pin_memory cpu cuda double",
        LINEAR, elementwise.same, "value input",
        "the same values", overwrites=True, copies=True),
    Row("copies and casts", "float half bfloat16", LINEAR, elementwise.to_float,
        "value input", "the same values, rounded", overwrites=True, copies=True),
    Row("copies and casts", "to type_as type", LINEAR, elementwise.to_dtype,
        "value input; dtype dtype other",
        "the same values in another dtype; rounding to whole numbers is not linear",
        overwrites=True, copies=True),
    *(Row("copies and casts", names, LINEAR,
          partial(elementwise.to_whole, holds_rows=holds), "value input",
          "the same values in another dtype; rounding to whole numbers is not linear",
          overwrites=True, copies=True)
      for names, holds in (("int long", True), ("short char", False))),
    Row("copies and casts", "bool byte", NONLINEAR, elementwise.to_bool, "value input",
        "small dtypes wrap, so the cast of a sum is not the sum of the casts",
        overwrites=True, copies=True),
    Row("copies and casts", "copy", LINEAR, elementwise.copy, "value input src/other",
        "the target becomes the source, so it must have the source's type",
        overwrites=True, copies=True),
    Row("copies and casts", "fill zero", LINEAR, elementwise.fill, "value input value",
        "every element becomes one number, which must be of the target's type: as fill_ "
        "may not change it, so fill does not", overwrites=True, copies=True),
    Row("reductions", "sum", LINEAR, reductions.reduction, REDUCED,
        "the sums of the pieces add up to the sum", along=SUM),
    Row("reductions", "nansum count_nonzero", NONLINEAR, reductions.reduction, REDUCED,
        "the sums of the pieces add up, but the elements are changed first", along=SUM),
    Row("reductions", "mean", LINEAR, reductions.mean, REDUCED,
        "a sum divided by a count", along=NOT_MEAN),
    Row("reductions", "amax amin aminmax prod logsumexp", NONLINEAR,
        reductions.reduction, REDUCED, "not a sum", along=NOT_MAX),
    Row("reductions", "all any", NONLINEAR, reductions.asked,
        "value input; dim dim; flag keepdim",
        "of the elements, whether all or any are true", along=NOT_MAX, forgets=OWN_ANSWER),
    Row("reductions", "nanmean", NONLINEAR, reductions.reduction, REDUCED,
        "not a sum", along=NEEDS_WHOLE),
    Row("reductions", "var std var_mean std_mean", NONLINEAR, reductions.reduction,
        "value input; dim dim; flag keepdim unbiased correction",
        "not a sum", along=NEEDS_WHOLE),
    Row("reductions", "norm linalg_vector_norm linalg_norm", NONLINEAR,
        reductions.reduction,
        "value input; flag p ord; dim dim; flag keepdim; dtype dtype",
        "the norm of a sum is not the sum of norms; sum the squares instead",
        along=NOT_NORM),
    Row("reductions", "max min median nanmedian mode", NONLINEAR, reductions.choice,
        "value input other; dim dim; flag keepdim",
        "chooses among elements", along=NOT_MAX),
    Row("reductions", "argmax argmin", NONLINEAR, reductions.position,
        "value input; dim dim; flag keepdim",
        "chooses among elements", along=NOT_MAX),
    Row("along a dim", "softmax log_softmax softmin", NONLINEAR, reductions.along,
        "value input; dim dim; dtype dtype",
        "every element depends on all others along the dim", along=NOT_SOFTMAX),
    Row("along a dim", "normalize", NONLINEAR, partial(reductions.along, dim=1),
        "value input; flag p eps; dim dim",
        "every element depends on all others along the dim", along=NEEDS_WHOLE),
    Row("along a dim", "cumsum", LINEAR, reductions.along,
        "value input; dim dim; dtype dtype",
        "a running sum is linear", along=NOT_RUNNING),
    Row("along a dim", "cumprod logcumsumexp", NONLINEAR, reductions.along,
        "value input; dim dim; dtype dtype",
        "a running result", along=NOT_RUNNING),
    Row("along a dim", "cummax cummin", NONLINEAR, reductions.running_choice,
        "value input; dim dim",
        "chooses among the elements so far", along=NOT_RUNNING),
    Row("along a dim", "flip", LINEAR, reductions.moved_along, "value input; dim dims",
        "elements change places along the dims",
        along="elements would change places within each piece only"),
    Row("along a dim", "roll", LINEAR, reductions.roll,
        "value input; choice shifts; dim dims",
        "elements change places along the dims",
        along="elements would change places within each piece only"),
    Row("along a dim", "sort", NONLINEAR, reductions.ordering,
        "value input; dim dim; flag descending stable",
        "the order depends on all values along the dim", along=NOT_SORTED,
        forgets=OWN_ORDER),
    Row("along a dim", "topk", NONLINEAR, reductions.ordering,
        "value input; choice k; dim dim; flag largest sorted",
        "the order depends on all values along the dim", along=NOT_SORTED),
    Row("along a dim", "argsort", NONLINEAR, reductions.order_alone,
        "value input; dim dim; flag descending stable",
        "the order depends on all values along the dim", forgets=OWN_ORDER),
    Row("along a dim", "msort", NONLINEAR, reductions.sorted_rows, "value input",
        "the order depends on all values along the dim", along=NOT_SORTED),
    Row("along a dim", "kthvalue", NONLINEAR, partial(reductions.choice, dim=-1),
        "value input; choice k; dim dim; flag keepdim",
        "the order depends on all values along the dim", along=NOT_SORTED),
    Row("counting", "bincount", LINEAR, reductions.bincount,
        "control input; value weights; flag minlength",
        "counts of the pieces add up to the counts; linear in the weights", along=SUM),
    Row("counting", "histc", LINEAR, reductions.histc, "control input; flag bins min max",
        "counts of the pieces add up to the counts", along=SUM, reads_floats=True),
    Row("counting", "one_hot", NONLINEAR, elementwise.one_hot,
        "value input; flag num_classes",
        "each id by itself"),
    Row("matrix products", "matmul mm bmm mv dot vdot", MULTILINEAR, products.matmul,
        "value input other/mat2/vec/tensor",
        "a contraction over a dim that both operands cut alike gives Partial"),
    Row("matrix products", "__rmatmul__", MULTILINEAR, products.matmul_reversed,
        "value input other",
        "as matmul, the operands exchanged"),
    Row("matrix products", "inner", MULTILINEAR, products.inner, "value input other",
        "a contraction over the last dims"),
    Row("matrix products", "linear", MULTILINEAR, products.linear,
        "value input weight bias",
        "as matmul; a bias is a term of a sum"),
    Row("matrix products", "addmm baddbmm addmv", MULTILINEAR, products.add_product,
        "value input left/mat1/batch1/mat right/mat2/batch2/vec; flag beta alpha",
        "as matmul; the added tensor is a term of a sum"),
    Row("matrix products", "outer ger", MULTILINEAR, products.outer, "value input vec2",
        "linear in each factor"),
    Row("matrix products", "einsum", MULTILINEAR, products.einsum, "value args",
        "letters left out of the result are contracted"),
    Row("matrix products", "grouped_mm _grouped_mm", MULTILINEAR, products.grouped_matmul,
        "value input/mat_a weight/mat_b/mat2; control offs; dtype out_dtype",
        "each group's rows with its own matrix"),
    Row("matrix products", "scaled_dot_product_attention", NONLINEAR, products.attention,
        "value query key value; control attn_mask; flag dropout_p is_causal scale "
        "enable_gqa",
        "batch and heads are independent; a softmax over the keys, with dropout by the "
        "rules of draws; linear in the values", takes="shared"),
    Row("norms and losses", "layer_norm rms_norm", NONLINEAR, losses.normalised,
        "value input weight bias; size normalized_shape; flag eps",
        "statistics over the last dims; linear in the weight, and a bias is a term"),
    Row("norms and losses", "cross_entropy", NONLINEAR, losses.cross_entropy,
        "value input target; control weight; flag size_average ignore_index reduce "
        "reduction label_smoothing",
        "a log-sum-exp over the classes, then a sum over rows; linear in targets that are "
        "probabilities; a weight is a given number"),
    Row("norms and losses", "nll_loss", LINEAR, losses.cross_entropy,
        "value input; control target weight; flag size_average ignore_index reduce "
        "reduction",
        "the score of one class of each row, then a sum over rows; a weight is a given "
        "number"),
    Row("norms and losses",
        "mse_loss l1_loss smooth_l1_loss binary_cross_entropy "
        "binary_cross_entropy_with_logits huber_loss",
        NONLINEAR, losses.elementwise_loss,
        "value input target weight pos_weight; flag size_average reduce reduction beta "
        "delta",
        "elementwise, then a sum over all elements; a weight is a given number"),
    Row("gathers", "gather", LINEAR, indexing.gather,
        "value input; dim dim; control index; flag sparse_grad",
        "linear in what is gathered; the index must count the rows of the dim"),
    Row("gathers", "take_along_dim", LINEAR, indexing.take_along_dim,
        "value input; control indices; dim dim",
        "as gather; dims of one row are broadcast"),
    Row("gathers", "index_select", LINEAR, indexing.index_select,
        "value input; dim dim; control index",
        "whole rows at the index"),
    Row("gathers", "embedding", LINEAR, indexing.embedding,
        "control input/indices; value weight; flag padding_idx max_norm norm_type "
        "scale_grad_by_freq",
        "rows of the weight; linear in the weight"),
    Row("gathers", "__getitem__", LINEAR, subscripts.getitem, "value input; subscript idx",
        "linear in what is indexed; a dim that is cut is taken whole", forgets=SELECTED),
    Row("gathers", "masked_select", LINEAR, indexing.masked_select,
        "value input; control mask",
        "linear in what is selected", forgets=SELECTED),
    Row("gathers", "nonzero argwhere", NONLINEAR, indexing.nonzero,
        "value input; flag as_tuple",
        "where the elements are that are not zero", forgets=SELECTED),
    Row("scatters", "scatter", LINEAR, indexing.scatter,
        "value input src value; dim dim; control index; flag reduce",
        "linear in target and source; the index must count the rows of the target",
        along=NOT_SCATTERED),
    Row("scatters", "scatter_add", LINEAR, indexing.scatter,
        "value input src; dim dim; control index",
        "sums at the index: sources that are spread over ranks make a Partial", along=SUM),
    Row("scatters", "scatter_reduce", NONLINEAR, indexing.scatter,
        "value input src; dim dim; control index; flag reduce include_self",
        "reduces at the index; if it sums, as scatter_add", along=NOT_SCATTERED),
    Row("scatters", "index_add", LINEAR, indexing.index_write,
        "value input source; dim dim; control index; flag alpha",
        "sums whole rows at the index: sources spread over ranks make a Partial",
        along=SUM),
    Row("scatters", "index_copy index_fill", LINEAR, indexing.index_write,
        "value input source value; dim dim; control index",
        "writes whole rows at the index", along=NOT_SCATTERED),
    Row("scatters", "__setitem__", LINEAR, subscripts.setitem,
        "value input v; subscript k",
        "the target keeps its type, so the value must have it too", writes=True),
    Row("scatters", "index_put", LINEAR, subscripts.index_put,
        "value input values; subscript indices; flag accumulate",
        "as x[index] = values; sources that are spread over ranks are for index_add"),
    Row("views", "view reshape", LINEAR, reshape.reshape,
        "value input; size size shape; dtype dtype",
        "a flattened inner dim that is cut gets a Folded extent, and back"),
    Row("views", "view_as reshape_as", LINEAR, reshape.reshape,
        "value input; size size/other",
        "as reshape"),
    Row("views", "flatten", LINEAR, reshape.flatten, "value input; dim start_dim end_dim",
        "as reshape"),
    Row("views", "ravel", LINEAR, reshape.flatten, "value input",
        "as reshape"),
    Row("views", "unflatten", LINEAR, reshape.unflatten,
        "value input; dim dim; size sizes",
        "as reshape"),
    Row("views", "permute", LINEAR, views.permute, "value input; dim dims", VIEW),
    Row("views", "transpose", LINEAR, views.transpose, "value input; dim dim0 dim1", VIEW),
    Row("views", "swapaxes swapdims", LINEAR, views.transpose,
        "value input; dim dim0/axis0 dim1/axis1", VIEW),
    Row("views", "t T H", LINEAR, views.reverse_dims, "value input", VIEW),
    Row("views", "mT mH adjoint", LINEAR, partial(views.transpose, dim0=-2, dim1=-1),
        "value input", VIEW),
    Row("views", "movedim moveaxis", LINEAR, views.movedim,
        "value input; dim source destination", VIEW),
    Row("views", "squeeze", LINEAR, views.squeeze, "value input; dim dim", VIEW),
    Row("views", "unsqueeze", LINEAR, views.unsqueeze, "value input; dim dim", VIEW),
    Row("views", "expand broadcast_to", LINEAR, views.expand, "value input; size size",
        "new dims are not cut, unless their size is that of a piece"),
    Row("views", "expand_as", LINEAR, views.expand, "value input; size size/other",
        "new dims are cut as those of the other tensor are"),
    Row("views", "repeat tile", LINEAR, views.repeat, "value input; size repeats dims",
        "copies of what is whole; as often as a piece has rows, they are cut so"),
    Row("views", "repeat_interleave", LINEAR, reshape.repeat_interleave,
        "value input; control repeats; dim dim; choice output_size",
        "every row several times in place: the pieces grow by that factor"),
    Row("views", "narrow", LINEAR, views.narrow,
        "value input; dim dim; choice start length",
        "rows of a dim that is not cut"),
    Row("views", "select", LINEAR, views.select, "value input; dim dim; choice index",
        "one row of a dim that is not cut"),
    Row("views", "unbind", LINEAR, views.unbind, "value input; dim dim",
        "rows of a dim that is not cut"),
    Row("views", "split chunk tensor_split split_with_sizes", LINEAR, views.pieces,
        "value input; choice split_size split_sizes split_size_or_sections chunks "
        "sections indices; dim dim",
        "parts of a dim that is not cut"),
    Row("views", "cat concat concatenate", LINEAR, views.joined, "value tensors; dim dim",
        "joined along a dim that is not cut"),
    Row("views", "stack", LINEAR, views.stacked, "value tensors; dim dim",
        "along a new dim"),
    Row("views", "pad", LINEAR, views.padded,
        "value input value; choice pad; flag mode",
        "linear if the padding is zero"),
    Row("factories", "zeros new_zeros", NO_VALUES, ZEROS, SIZED, NUMBER,
        takes="mesh"),
    Row("factories", "zeros_like", NO_VALUES, ZEROS, SHAPED, NUMBER,
        takes="mesh"),
    Row("factories", "ones new_ones", NO_VALUES, ONES, SIZED, NUMBER,
        takes="mesh"),
    Row("factories", "ones_like", NO_VALUES, ONES, SHAPED, NUMBER,
        takes="mesh"),
    Row("factories", "full new_full", NO_VALUES, factories.full,
        f"{SIZED}; value fill_value", NUMBER, takes="mesh"),
    Row("factories", "full_like", NO_VALUES, factories.full,
        f"{SHAPED}; value fill_value", NUMBER, takes="mesh"),
    Row("factories", "empty new_empty empty_strided", NO_VALUES, factories.uninitialised,
        f"{SIZED}; flag stride",
        "what the memory held: unrelated on every rank", takes="mesh"),
    Row("factories", "empty_like", NO_VALUES, factories.uninitialised, SHAPED,
        "what the memory held: unrelated on every rank", takes="mesh"),
    Row("factories", "arange", NO_VALUES, factories.numbered,
        "choice start step; size end; dtype dtype",
        "equal on all ranks; up to the size of a piece, the numbers of its rows",
        takes="mesh"),
    Row("factories",
        "linspace eye",
        NO_VALUES, factories.counted,
        "choice start end steps n m; dtype dtype",
        "equal on all ranks", takes="mesh"),
    Row("random", "dropout", LINEAR, random.dropout,
        "value input; flag p training/train",
        "a product with a random mask, which ranks share only if the caller says so",
        takes="shared", overwrites=True),
    Row("random", "bernoulli", NO_VALUES, random.sample, "value input p",
        "drawn numbers, which ranks share only if the caller says so", takes="shared",
        overwrites=True),
    Row("random", "multinomial", NO_VALUES, random.multinomial,
        "value input; choice num_samples; flag replacement",
        "drawn numbers, which ranks share only if the caller says so", takes="shared"),
    Row("random",
        "rand_like randn_like randint_like uniform exponential random",
        NO_VALUES, random.like,
        "value input; flag from to low high lambd; dtype dtype",
        FRESH, takes="shared", overwrites=True),
    Row("random", "normal", NO_VALUES, random.normal,
        "value input mean std; size size; dtype dtype",
        "fresh numbers in a tensor's place, or around its elements", takes="shared",
        overwrites=True),
    Row("random", "rand randn randint", NO_VALUES, random.create,
        "size size; flag low high; dtype dtype",
        "fresh numbers; in the sizes of a piece they are a piece", takes="mesh shared"),
    Row("random", "randperm", NO_VALUES, random.permutation,
        "choice n; dtype dtype",
        "a fresh order", takes="mesh shared"),
    *arrangements.ROWS,
    *elements.ROWS,
    *matrices.ROWS,
    *networks.ROWS,
)  # fmt: skip


def _op(name: str, row: Row) -> Op:
    roles, other_names = parsed_slots(row.slots)
    return Op(**vars(row), name=name, roles=roles, other_names=other_names)


OPS: dict[str, Op] = {name: _op(name, row) for row in ROWS for name in row.names.split()}

# Functions of torch in Python that are made of other ops, each of which is judged.
# So are the functions of torch.nn.init.
COMPOSED = frozenset(
    "dropout1d dropout2d dropout3d gaussian_nll_loss gumbel_softmax lp_pool1d "
    "lp_pool2d lp_pool3d multi_head_attention_forward multilabel_soft_margin_loss "
    "triplet_margin_with_distance_loss".split()
)

# Reading a value as a Python number: refused while it is pending a sum.
READS = frozenset(
    "item tolist __bool__ __float__ __int__ __index__ __complex__ __contains__ numpy "
    "__array__ equal allclose is_nonzero".split()
)

# Tensors of numbers that stand in the program; of anything else they are sources.
LITERALS = frozenset("tensor new_tensor as_tensor asarray".split())

# Tensors from outside: nobody has said yet what they are, so they come without a type.
SOURCES = LITERALS | {"from_numpy", "frombuffer", "from_dlpack"}

# Questions about a tensor that reveal no value, and settings that change none.
METADATA = frozenset(
    "shape dtype device requires_grad is_leaf grad_fn ndim layout is_sparse is_cuda "
    "is_cpu is_meta is_mkldnn is_quantized is_mps is_xpu is_nested name names "
    "retains_grad output_nr itemsize nbytes _version _base is_inference "
    "size dim numel nelement stride storage_offset is_contiguous is_floating_point "
    "requires_grad_ is_complex is_signed data_ptr element_size untyped_storage storage "
    "storage_type "
    "get_device __len__ __repr__ __str__ __format__ __hash__ register_hook _is_view "
    "register_post_accumulate_grad_hook retain_grad dim_order __dir__ has_names "
    "is_tensor is_storage result_type can_cast promote_types broadcast_tensors_shape "
    "_has_compatible_shallow_copy_type "
    "_set_grad_enabled is_same_size is_shared _typed_storage is_pinned ndimension "
    "_backward_hooks _post_accumulate_grad_hooks set_default_dtype record_stream "
    "_parse_to profiler::_record_function_enter_new profiler::_record_function_exit "
    "__deepcopy__ __reduce_ex__ __setstate__ is_distributed volatile_ "
    "is_xla is_mtia is_maia is_vulkan is_ipu is_sparse_csr is_set_to share_memory_ "
    "is_conj is_neg resolve_conj_ resolve_neg_ grad_dtype __cuda_array_interface__".split()
)
