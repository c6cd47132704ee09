"""Table: for every op of `placements.inference.ops`, the builder of its calls."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import strategies as st

from placements.inference.ops import OPS
from placements.testing.cases import arrangements as a
from placements.testing.cases import elementwise as e
from placements.testing.cases import indexing as i
from placements.testing.cases import matrices as m
from placements.testing.cases import networks as n
from placements.testing.cases import products as p
from placements.testing.cases import views as v
from placements.testing.cases.build import Builder, OpCall, function_of, is_callable

BY_BUILDER: dict[Callable[[Builder], OpCall], str] = {
    e.unary: "abs absolute acos acosh asin asinh atan atanh ceil celu cos cosh elu erf "
    "erfc erfinv exp exp2 expm1 floor frac gelu hardsigmoid hardswish hardtanh isfinite "
    "isinf isnan isneginf isposinf leaky_relu lgamma log log10 log1p log2 logical_not "
    "logit log_sigmoid mish nan_to_num reciprocal relu relu6 round rsqrt selu sgn sigmoid "
    "sign signbit silu sin sinc sinh softplus softsign sqrt square tan tanh tanhshrink "
    "trunc arccos arccosh arcsin arcsinh arctan arctanh deg2rad digamma fix frexp "
    "hardshrink i0 isreal rad2deg softshrink special_airy_ai special_bessel_j0 "
    "special_bessel_j1 special_bessel_y0 special_bessel_y1 special_digamma special_erf "
    "special_erfc special_erfcx special_erfinv special_exp2 special_expm1 "
    "special_gammaln special_i0 special_i0e special_i1 special_i1e special_log1p "
    "special_log_ndtr special_logit special_ndtr special_ndtri special_psi special_round "
    "special_sinc angle special_expit special_entr neg negative positive clone "
    "contiguous detach data "
    "cpu",
    e.unary_whole: "bitwise_not __invert__",
    e.binary: "eq __eq__ ge gt le lt ne float_power floor_divide fmod pow remainder "
    "__mod__ "
    "__floordiv__ greater greater_equal less less_equal not_equal "
    "special_xlogy special_zeta ldexp add sub subtract rsub mul multiply xlogy "
    "__radd__ __rsub__ __rmul__",
    e.binary_tensors: "atan2 fmax fmin hypot isclose logaddexp logical_and logical_or "
    "logical_xor maximum minimum arctan2 copysign heaviside igamma igammac logaddexp2 "
    "nextafter special_gammainc special_gammaincc",
    e.binary_whole: "bitwise_and bitwise_or bitwise_xor bitwise_left_shift "
    "bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ gcd lcm",
    e.shifted_by_tensor: "__rand__ __ror__ __rxor__",
    e.with_number: "__rpow__ __rmod__ __rfloordiv__ clamp_max clamp_min __rtruediv__ "
    "__rdiv__",
    e.mvlgamma: "mvlgamma",
    e.polygamma: "polygamma special_polygamma",
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
    e.reduction: "sum nansum count_nonzero mean amax amin aminmax all any prod logsumexp "
    "var std var_mean std_mean nanmean",
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
    n.convolution: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d",
    n.pool: "max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d max_pool2d_with_indices "
    "adaptive_max_pool1d_with_indices "
    "adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices avg_pool1d "
    "avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
    n.interpolate: "interpolate",
    n.grid_sample: "grid_sample",
    n.shuffle: "pixel_shuffle",
    n.unfold: "unfold",
    n.fold: "fold",
    n.batch_norm: "batch_norm",
    n.instance_norm: "instance_norm",
    n.group_norm: "group_norm",
    n.local_response_norm: "local_response_norm",
    n.prelu: "prelu",
    n.loss: "kl_div poisson_nll_loss hinge_embedding_loss margin_ranking_loss",
    n.row_loss: "triplet_margin_loss",
    n.norm_except: "norm_except_dim",
    n.weight_norm: "_weight_norm",
    n.recurrent: "lstm gru rnn_tanh rnn_relu",
    n.recurrent_cell: "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
    n.drops_channels: "feature_dropout",
    m.each: "cholesky cholesky_inverse det inverse linalg_cholesky linalg_cond linalg_det "
    "linalg_eigh linalg_eigvalsh linalg_inv linalg_inv_ex linalg_matrix_exp "
    "linalg_matrix_power linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet "
    "linalg_svd linalg_svdvals logdet matrix_exp matrix_power pinverse qr slogdet svd",
    m.solved: "linalg_solve linalg_solve_triangular",
    m.matrix_norm: "linalg_matrix_norm",
    m.multi_dot: "linalg_multi_dot chain_matmul",
    m.tensordot: "tensordot",
    m.addr: "addr",
    m.addbmm: "addbmm",
    m.bilinear: "bilinear",
    m.cross: "cross linalg_cross",
    m.compared: "linalg_vecdot cosine_similarity pairwise_distance",
    m.distances: "cdist",
    m.diagonal: "diagonal linalg_diagonal diag_embed",
    m.complex_part: "real imag conj conj_physical resolve_conj resolve_neg",
    m.of_pairs: "view_as_complex",
    m.to_pairs: "view_as_real",
    m.two_parts: "complex polar",
    m.to_complex: "cfloat cdouble",
    m.spectrum: "fft_fft fft_rfft fft_irfft fft_hfft fft_fft2 fft_ifft2 "
    "fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_fftshift "
    "fft_ifftshift",
    a.stacked: "hstack vstack row_stack dstack column_stack",
    a.at_least: "atleast_1d atleast_2d atleast_3d",
    a.kron: "kron",
    a.broadcast: "broadcast_tensors",
    a.grid: "meshgrid",
    a.taken: "take",
    a.filled_diagonal: "fill_diagonal",
    a.parts: "hsplit vsplit dsplit",
    a.difference: "diff",
    a.glu: "glu",
    a.turned: "fliplr flipud rot90",
    a.unique: "unique_consecutive",
    a.bucketed: "bucketize searchsorted",
    a.is_among: "isin",
    a.masked_scatter: "masked_scatter",
    a.scattered_rows: "select_scatter slice_scatter",
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
    v.matrix: "T mT H mH adjoint",
    v.movedim: "movedim moveaxis",
    v.squeeze: "squeeze",
    v.unsqueeze: "unsqueeze",
    v.expand: "expand broadcast_to expand_as",
    v.repeat: "repeat tile",
    v.repeat_interleave: "repeat_interleave",
    v.narrow: "narrow narrow_copy",
    v.select: "select",
    v.unbind: "unbind",
    v.pieces: "split chunk tensor_split split_with_sizes unsafe_split unsafe_chunk "
    "unsafe_split_with_sizes",
    v.joined: "cat concat concatenate",
    v.stacked: "stack",
    v.triangle: "tril triu",
    v.pad: "pad",
    v.filled: "zeros ones full",
    v.filled_like: "zeros_like ones_like full_like",
    v.filled_new: "new_zeros new_ones new_full",
    v.empty_like: "empty_like new_empty",
    v.empty: "empty empty_strided",
    v.counted: "arange linspace eye ",
    v.dropout: "dropout",
    v.sample: "bernoulli multinomial",
    v.drawn_like: "rand_like randn_like randint_like normal uniform exponential random "
    "cauchy log_normal",
    v.drawn: "rand randn randint randperm",
}

# Ops that cannot be called here, and why.
NOT_CALLED: dict[str, str] = {
    "cuda": "needs a GPU",
    "pin_memory": "needs an accelerator",
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
