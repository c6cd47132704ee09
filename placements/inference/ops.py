"""Table: every torch op that is known, how it treats its operands, and its flow.

A new op is one row here. `along` says what becomes of a dim that the op works along when
that dim is cut: `SUM` (the pieces' results add up, so the result is Partial), or the
reason why it is refused. Ops are found by their torch name; an in-place form (`add_`) is
found by the name of its plain one.
"""

from dataclasses import dataclass

from placements.inference.flows import (
    elementwise,
    indexing,
    losses,
    products,
    random,
    reshape,
    subscripts,
    views,
)
from placements.inference.flows import factories as create
from placements.inference.op import SUM, Flow, Op
from placements.inference.rules import LINEAR, MULTILINEAR, NO_VALUES, NONLINEAR, Linearity


@dataclass(frozen=True)
class Row:
    """Ops that are alike, and why they are treated as they are."""

    group: str
    names: str
    linearity: Linearity
    flow: Flow
    why: str
    along: str = ""
    takes: str = ""
    forgets: str = ""


NEEDS_WHOLE = "it needs the whole dim, and this rank holds a piece of it"
NOT_MEAN = (
    "a mean over a dim that is cut divides by this rank's count; take the sum, which is "
    "Partial, and divide by the global count (global_mean)"
)
NOT_MAX = (
    "the largest of a piece is not the largest of all, and Partial means sum; gather the "
    "dim first"
)
NOT_SORTED = (
    "the order within a piece is not the order of the whole dim; sort a piece as the "
    "rank's own rows (Varying), or gather the dim first"
)
NOT_SOFTMAX = "a softmax needs the whole dim: the sum of a piece is not that of all"
NOT_RUNNING = "a running result needs what came before on the other ranks"
NOT_SCATTERED = indexing.POSITIONS
SELECTED = "how many elements a mask selects of a piece only its rank knows"

ROWS: tuple[Row, ...] = (
    Row("elementwise",
        "abs absolute acos acosh asin asinh atan atan2 atanh bitwise_and "
        "bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil "
        "celu clamp clamp_max clamp_min clip cos cosh elu eq erf erfc erfinv exp exp2 "
        "expm1 float_power floor floor_divide fmax fmin fmod frac ge gelu gt hardsigmoid "
        "hardswish hardtanh hypot isclose isfinite isinf isnan isneginf isposinf le "
        "leaky_relu lgamma log log10 log1p log2 logaddexp logical_and logical_not "
        "logical_or logical_xor logit log_sigmoid lt maximum minimum mish nan_to_num ne "
        "pow reciprocal relu relu6 remainder round rsqrt selu sgn sigmoid sign signbit "
        "silu sin sinc sinh softplus softsign sqrt square tan tanh tanhshrink threshold "
        "trunc xlogy addcdiv addcmul special_expit special_entr __eq__ __and__ __or__ "
        "__xor__ __invert__ __lshift__ __rshift__ __rand__ __ror__ __rxor__ __rpow__ "
        "__mod__ __rmod__ __floordiv__ __rfloordiv__",
        NONLINEAR, elementwise.pointwise,
        "each element by itself, but f(a + b) is not f(a) + f(b)"),
    Row("sums", "add sub subtract rsub __rsub__ __radd__", LINEAR, elementwise.pointwise,
        "a sum of sums is a sum; every term must be pending it"),
    Row("products", "mul multiply __rmul__", MULTILINEAR, elementwise.pointwise,
        "linear in one factor when the others are given"),
    Row("quotients", "div divide true_divide", LINEAR, elementwise.quotient,
        "linear in the numerator; the divisor must not be pending a sum"),
    Row("quotients", "lerp", LINEAR, elementwise.lerp,
        "linear in both ends; the weight must not be pending a sum"),
    Row("quotients", "__rtruediv__ __rdiv__", NONLINEAR, elementwise.pointwise,
        "a number divided by a sum is not the sum of the quotients"),
    Row("signs", "neg negative positive", LINEAR, elementwise.same,
        "linear"),
    Row("choosing elements", "where", LINEAR, elementwise.where,
        "linear in both branches; the condition must be common to the ranks of a sum"),
    Row("choosing elements", "masked_fill", LINEAR, elementwise.masked_fill,
        "linear if the fill is zero; the mask must be common to the ranks of a sum"),
    Row("copies and casts",
        "clone contiguous detach data pin_memory cpu cuda",
        LINEAR, elementwise.same,
        "the same values"),
    Row("copies and casts",
        "to type_as type float double half bfloat16 int long short bool char byte",
        LINEAR, elementwise.to_dtype,
        "the same values in another dtype; rounding to whole numbers is not linear"),
    Row("copies and casts", "copy", LINEAR, elementwise.copy,
        "the target becomes the source, so it must have the source's type"),
    Row("copies and casts", "fill zero", LINEAR, elementwise.fill,
        "every element becomes one number, which must be of the target's type: as fill_ "
        "may not change it, so fill does not"),
    Row("reductions", "sum", LINEAR, elementwise.reduction,
        "the sums of the pieces add up to the sum", along=SUM),
    Row("reductions", "nansum count_nonzero", NONLINEAR, elementwise.reduction,
        "the sums of the pieces add up, but the elements are changed first", along=SUM),
    Row("reductions", "mean", LINEAR, elementwise.reduction,
        "a sum divided by a count", along=NOT_MEAN),
    Row("reductions", "amax amin all any prod logsumexp", NONLINEAR, elementwise.reduction,
        "not a sum", along=NOT_MAX),
    Row("reductions", "var std var_mean std_mean nanmean", NONLINEAR, elementwise.reduction,
        "not a sum", along=NEEDS_WHOLE),
    Row("reductions", "norm linalg_vector_norm linalg_norm", NONLINEAR, elementwise.norm,
        "the norm of a sum is not the sum of norms; sum the squares instead",
        along=NEEDS_WHOLE),
    Row("reductions", "max min median nanmedian mode", NONLINEAR, elementwise.choice,
        "chooses among elements", along=NOT_MAX),
    Row("reductions", "argmax argmin", NONLINEAR, elementwise.position,
        "chooses among elements", along=NOT_MAX),
    Row("along a dim", "softmax log_softmax softmin", NONLINEAR, elementwise.along,
        "every element depends on all others along the dim", along=NOT_SOFTMAX),
    Row("along a dim", "normalize", NONLINEAR, elementwise.normalize,
        "every element depends on all others along the dim", along=NEEDS_WHOLE),
    Row("along a dim", "cumsum", LINEAR, elementwise.along,
        "a running sum is linear", along=NOT_RUNNING),
    Row("along a dim", "cumprod logcumsumexp", NONLINEAR, elementwise.along,
        "a running result", along=NOT_RUNNING),
    Row("along a dim", "cummax cummin", NONLINEAR, elementwise.running_choice,
        "chooses among the elements so far", along=NOT_RUNNING),
    Row("along a dim", "flip", LINEAR, elementwise.flip,
        "elements change places along the dims",
        along="elements would change places within each piece only"),
    Row("along a dim", "roll", LINEAR, elementwise.roll,
        "elements change places along the dims",
        along="elements would change places within each piece only"),
    Row("along a dim", "topk sort argsort msort", NONLINEAR, elementwise.ordering,
        "the order depends on all values along the dim", along=NOT_SORTED),
    Row("along a dim", "kthvalue", NONLINEAR, elementwise.kthvalue,
        "the order depends on all values along the dim", along=NOT_SORTED),
    Row("counting", "bincount histc", LINEAR, elementwise.count,
        "counts of the pieces add up to the counts; linear in the weights", along=SUM),
    Row("counting", "one_hot", NONLINEAR, elementwise.one_hot,
        "each id by itself"),
    Row("matrix products", "matmul mm bmm mv dot vdot", MULTILINEAR, products.matmul,
        "a contraction over a dim that both operands cut alike gives Partial"),
    Row("matrix products", "__rmatmul__", MULTILINEAR, products.matmul_reversed,
        "as matmul, the operands exchanged"),
    Row("matrix products", "inner", MULTILINEAR, products.inner,
        "a contraction over the last dims"),
    Row("matrix products", "linear", MULTILINEAR, products.linear,
        "as matmul; a bias is a term of a sum"),
    Row("matrix products", "addmm baddbmm addmv", MULTILINEAR, products.add_product,
        "as matmul; the added tensor is a term of a sum"),
    Row("matrix products", "outer ger", MULTILINEAR, products.outer,
        "linear in each factor"),
    Row("matrix products", "einsum", MULTILINEAR, products.einsum,
        "letters left out of the result are contracted"),
    Row("matrix products", "grouped_mm _grouped_mm", MULTILINEAR, products.grouped_matmul,
        "each group's rows with its own matrix"),
    Row("matrix products", "scaled_dot_product_attention", NONLINEAR, products.attention,
        "batch and heads are independent; a softmax runs over the keys; linear in the "
        "values"),
    Row("norms and losses", "layer_norm rms_norm", NONLINEAR, losses.normalised,
        "statistics over the last dims; linear in the weight, and a bias is a term"),
    Row("norms and losses", "cross_entropy", NONLINEAR, losses.cross_entropy,
        "a log-sum-exp over the classes, then a sum over rows; linear in targets that are "
        "probabilities; a weight is a given number"),
    Row("norms and losses", "nll_loss", LINEAR, losses.cross_entropy,
        "the score of one class of each row, then a sum over rows; a weight is a given "
        "number"),
    Row("norms and losses",
        "mse_loss l1_loss smooth_l1_loss binary_cross_entropy "
        "binary_cross_entropy_with_logits huber_loss",
        NONLINEAR, losses.elementwise_loss,
        "elementwise, then a sum over all elements; a weight is a given number"),
    Row("gathers", "gather", LINEAR, indexing.gather,
        "linear in what is gathered; the index must count the rows of the dim"),
    Row("gathers", "take_along_dim", LINEAR, indexing.take_along_dim,
        "as gather; dims of one row are broadcast"),
    Row("gathers", "index_select", LINEAR, indexing.index_select,
        "whole rows at the index"),
    Row("gathers", "embedding", LINEAR, indexing.embedding,
        "rows of the weight; linear in the weight"),
    Row("gathers", "__getitem__", LINEAR, subscripts.getitem,
        "linear in what is indexed; a dim that is cut is taken whole", forgets=SELECTED),
    Row("gathers", "masked_select", LINEAR, indexing.masked_select,
        "linear in what is selected", forgets=SELECTED),
    Row("gathers", "nonzero argwhere", NONLINEAR, indexing.nonzero,
        "where the elements are that are not zero", forgets=SELECTED),
    Row("scatters", "scatter", LINEAR, indexing.scatter,
        "linear in target and source; the index must count the rows of the target",
        along=NOT_SCATTERED),
    Row("scatters", "scatter_add", LINEAR, indexing.scatter,
        "sums at the index: sources that are spread over ranks make a Partial", along=SUM),
    Row("scatters", "scatter_reduce", NONLINEAR, indexing.scatter,
        "reduces at the index; if it sums, as scatter_add", along=NOT_SCATTERED),
    Row("scatters", "index_add", LINEAR, indexing.index_write,
        "sums whole rows at the index: sources spread over ranks make a Partial",
        along=SUM),
    Row("scatters", "index_copy index_fill", LINEAR, indexing.index_write,
        "writes whole rows at the index", along=NOT_SCATTERED),
    Row("scatters", "__setitem__", LINEAR, subscripts.setitem,
        "the target keeps its type, so the value must have it too"),
    Row("scatters", "index_put", LINEAR, subscripts.index_put,
        "as x[index] = values; sources that are spread over ranks are for index_add"),
    Row("views", "view reshape", LINEAR, reshape.reshape,
        "a flattened inner dim that is cut gets a Folded extent, and back"),
    Row("views", "view_as reshape_as", LINEAR, reshape.reshape_as,
        "as reshape"),
    Row("views", "flatten", LINEAR, reshape.flatten,
        "as reshape"),
    Row("views", "ravel", LINEAR, reshape.ravel,
        "as reshape"),
    Row("views", "unflatten", LINEAR, reshape.unflatten,
        "as reshape"),
    Row("views", "permute", LINEAR, views.permute,
        "the cut goes with its dim"),
    Row("views", "transpose swapaxes swapdims", LINEAR, views.transpose,
        "the cut goes with its dim"),
    Row("views", "t T", LINEAR, views.reverse_dims,
        "the cut goes with its dim"),
    Row("views", "mT adjoint", LINEAR, views.swap_last,
        "the cut goes with its dim"),
    Row("views", "movedim moveaxis", LINEAR, views.movedim,
        "the cut goes with its dim"),
    Row("views", "squeeze", LINEAR, views.squeeze,
        "the cut goes with its dim"),
    Row("views", "unsqueeze", LINEAR, views.unsqueeze,
        "the cut goes with its dim"),
    Row("views", "expand broadcast_to", LINEAR, views.expand,
        "new dims are not cut"),
    Row("views", "expand_as", LINEAR, views.expand_as,
        "new dims are not cut"),
    Row("views", "repeat tile", LINEAR, views.repeat,
        "dims that are not cut repeat"),
    Row("views", "repeat_interleave", LINEAR, reshape.repeat_interleave,
        "every row several times in place: the pieces grow by that factor"),
    Row("views", "narrow", LINEAR, views.narrow,
        "rows of a dim that is not cut"),
    Row("views", "select", LINEAR, views.select,
        "one row of a dim that is not cut"),
    Row("views", "unbind", LINEAR, views.unbind,
        "rows of a dim that is not cut"),
    Row("views", "split chunk tensor_split split_with_sizes", LINEAR, views.pieces,
        "parts of a dim that is not cut"),
    Row("views", "cat concat concatenate", LINEAR, views.joined,
        "joined along a dim that is not cut"),
    Row("views", "stack", LINEAR, views.stacked,
        "along a new dim"),
    Row("views", "tril triu", LINEAR, views.triangle,
        "zeros where the place in the matrix says so"),
    Row("views", "pad", LINEAR, views.padded,
        "linear if the padding is zero"),
    Row("factories",
        "zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full",
        NO_VALUES, create.filled,
        "one number, given a shape: it goes with any type", takes="mesh"),
    Row("factories",
        "empty empty_like new_empty empty_strided",
        NO_VALUES, create.uninitialised,
        "what the memory held: unrelated on every rank", takes="mesh"),
    Row("factories", "arange linspace eye", NO_VALUES, create.counted,
        "equal on all ranks", takes="mesh"),
    Row("random", "dropout", LINEAR, random.dropout,
        "a product with a random mask, which ranks share only if the caller says so",
        takes="shared"),
    Row("random", "bernoulli multinomial", NO_VALUES, random.sample,
        "drawn numbers, which ranks share only if the caller says so", takes="shared"),
    Row("random",
        "rand_like randn_like randint_like normal uniform exponential random "
        "kaiming_uniform kaiming_normal xavier_uniform xavier_normal trunc_normal "
        "orthogonal",
        NO_VALUES, random.like,
        "fresh numbers in a tensor's shape or place", takes="shared"),
    Row("random", "rand randn randint randperm", NO_VALUES, random.create,
        "fresh numbers", takes="mesh shared"),
)  # fmt: skip

OPS: dict[str, Op] = {
    name: Op(name, row.group, row.linearity, row.flow, row.along, row.takes, row.forgets)
    for row in ROWS
    for name in row.names.split()
}

# Reading a value as a Python number: refused while it is pending a sum.
READS = frozenset(
    "item tolist __bool__ __float__ __int__ __index__ __complex__ __contains__ numpy "
    "__array__ equal allclose is_nonzero".split()
)

# Tensors from outside: nobody has said yet what they are, so they come without a type.
SOURCES = frozenset(
    "tensor new_tensor as_tensor asarray from_numpy frombuffer from_dlpack".split()
)

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
    "is_conj is_neg resolve_conj_ resolve_neg_ grad_dtype __cuda_array_interface__".split()
)
