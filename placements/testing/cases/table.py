"""Table: for every op of `placements.inference.ops`, the builder of its calls."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import strategies as st

from placements.inference.ops import OPS
from placements.testing.cases import elementwise as e
from placements.testing.cases import indexing as i
from placements.testing.cases import products as p
from placements.testing.cases import views as v
from placements.testing.cases.build import Builder, OpCall, function_of, is_callable

BY_BUILDER: dict[Callable[[Builder], OpCall], str] = {
    e.unary: "abs absolute acos acosh asin asinh atan atanh ceil celu cos cosh elu erf "
    "erfc erfinv exp exp2 expm1 floor frac gelu hardsigmoid hardswish hardtanh isfinite "
    "isinf isnan isneginf isposinf leaky_relu lgamma log log10 log1p log2 logical_not "
    "logit log_sigmoid mish nan_to_num reciprocal relu relu6 round rsqrt selu sgn sigmoid "
    "sign signbit silu sin sinc sinh softplus softsign sqrt square tan tanh tanhshrink "
    "trunc special_expit special_entr neg negative positive clone contiguous detach data "
    "cpu",
    e.unary_whole: "bitwise_not __invert__",
    e.binary: "eq __eq__ ge gt le lt ne float_power floor_divide fmod pow remainder "
    "__mod__ "
    "__floordiv__ add sub subtract rsub mul multiply xlogy __radd__ __rsub__ __rmul__",
    e.binary_tensors: "atan2 fmax fmin hypot isclose logaddexp logical_and logical_or "
    "logical_xor maximum minimum",
    e.binary_whole: "bitwise_and bitwise_or bitwise_xor bitwise_left_shift "
    "bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__",
    e.shifted_by_tensor: "__rand__ __ror__ __rxor__",
    e.with_number: "__rpow__ __rmod__ __rfloordiv__ clamp_max clamp_min __rtruediv__ "
    "__rdiv__",
    e.clamp: "clamp clip",
    e.threshold: "threshold",
    e.ternary: "addcdiv addcmul",
    e.lerp: "lerp",
    e.quotient: "div divide true_divide",
    e.where: "where",
    e.masked_fill: "masked_fill",
    e.cast: "to type_as type float double half bfloat16 int long short bool char byte",
    e.copy: "copy",
    e.fill: "fill zero",
    e.reduction: "sum nansum count_nonzero mean amax amin all any prod logsumexp var std "
    "var_mean std_mean nanmean",
    e.norm: "norm linalg_vector_norm linalg_norm",
    e.choice: "max min median nanmedian mode cummax cummin",
    e.position: "argmax argmin",
    e.along: "softmax log_softmax softmin cumsum cumprod logcumsumexp",
    e.normalize: "normalize",
    e.flip: "flip",
    e.roll: "roll",
    e.ordering: "topk sort argsort kthvalue msort",
    e.bincount: "bincount",
    e.histc: "histc",
    e.one_hot: "one_hot",
    p.matmul: "matmul mm bmm mv dot vdot inner __rmatmul__",
    p.linear: "linear",
    p.add_product: "addmm baddbmm addmv",
    p.outer: "outer ger",
    p.einsum: "einsum",
    p.grouped: "grouped_mm _grouped_mm",
    p.attention: "scaled_dot_product_attention",
    p.normalised: "layer_norm rms_norm",
    p.cross_entropy: "cross_entropy nll_loss",
    p.elementwise_loss: "mse_loss l1_loss smooth_l1_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits huber_loss",
    i.gather: "gather",
    i.take_along_dim: "take_along_dim",
    i.index_select: "index_select",
    i.embedding: "embedding",
    i.getitem: "__getitem__",
    i.masked_select: "masked_select",
    i.nonzero: "nonzero argwhere",
    i.scatter: "scatter scatter_add scatter_reduce",
    i.index_write: "index_add index_copy index_fill",
    i.setitem: "__setitem__",
    i.index_put: "index_put",
    v.reshape: "view reshape view_as reshape_as",
    v.flatten: "flatten ravel",
    v.unflatten: "unflatten",
    v.permute: "permute",
    v.two_dims: "transpose swapaxes swapdims",
    v.at_most_matrix: "t",
    v.matrix: "T mT adjoint",
    v.movedim: "movedim moveaxis",
    v.squeeze: "squeeze",
    v.unsqueeze: "unsqueeze",
    v.expand: "expand broadcast_to expand_as",
    v.repeat: "repeat tile",
    v.repeat_interleave: "repeat_interleave",
    v.narrow: "narrow",
    v.select: "select",
    v.unbind: "unbind",
    v.pieces: "split chunk tensor_split split_with_sizes",
    v.joined: "cat concat concatenate",
    v.stacked: "stack",
    v.triangle: "tril triu",
    v.pad: "pad",
    v.filled: "zeros ones full",
    v.filled_like: "zeros_like ones_like full_like",
    v.filled_new: "new_zeros new_ones new_full",
    v.empty_like: "empty_like new_empty",
    v.empty: "empty empty_strided",
    v.counted: "arange linspace eye",
    v.dropout: "dropout",
    v.sample: "bernoulli multinomial",
    v.drawn_like: "rand_like randn_like randint_like normal uniform exponential random",
    v.drawn: "rand randn randint randperm",
}

# Ops that cannot be called here, and why.
NOT_CALLED: dict[str, str] = {
    "cuda": "needs a GPU",
    "pin_memory": "needs an accelerator",
    **dict.fromkeys(
        "kaiming_uniform kaiming_normal xavier_uniform xavier_normal trunc_normal "
        "orthogonal".split(),
        "an initialiser of torch.nn.init, in place only: like normal_",
    ),
}

CASES: dict[str, Callable[[Builder], OpCall]] = {
    name: builder for builder, names in BY_BUILDER.items() for name in names.split()
}


def call_names() -> list[str]:
    """Return every name that the table knows and torch has, in-place forms included."""
    names: list[str] = []
    for name in OPS:
        plain = is_callable(name)
        in_place = any(hasattr(owner, f"{name}_") for owner in (torch.Tensor, F))
        if plain:
            names.append(name)
        if in_place and not name.startswith("_"):
            names.append(f"{name}_")
    return [name for name in names if name not in NOT_CALLED]


@st.composite
def calls(
    draw: st.DrawFn, *, name: str, sizes: Sequence[int] = (1, 2, 3, 4, 5, 0)
) -> OpCall:
    """Draw calls of one op by its name in the table (or its in-place form).

    `sizes`: of dims, the simplest first.
    """
    plain = name if name in CASES else name.removesuffix("_")
    if plain not in CASES:
        raise ValueError(f"no builder for calls of {name!r}; add it to BY_BUILDER")
    function_of(name)
    return CASES[plain](Builder(draw, name, sizes))
