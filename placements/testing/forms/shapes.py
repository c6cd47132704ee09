"""Tables: the shapes and values that an op needs, so that its lines run on one device."""

# Shapes where operands must fit together, by slot; a letter is a size. Elsewhere all
# operands have one shape, or shapes that broadcast to it.
SHAPES: dict[str, tuple[str, ...]] = {
    "mm": ("self=AB mat2=BC",),
    "bmm": ("self=ABC mat2=ACD",),
    "mv": ("self=AB vec=B",),
    "dot": ("self=A tensor=A",),
    "vdot": ("self=A other=A",),
    "inner": ("self=AB other=CB", "self=B other=AB"),
    "matmul": ("self=AB other=BC", "self=B other=BC", "self=ABC other=CD",
               "self=ABC other=ACD", "self=AB other=B"),
    "__rmatmul__": ("other=AB self=BC", "other=B self=BC", "other=ABC self=CD"),
    "linear": ("input=AB weight=CB bias=C", "input=ABC weight=DC bias=D",
    "input=B weight=CB"),
    "addmm": ("self=AC mat1=AB mat2=BC", "self=C mat1=AB mat2=BC"),
    "baddbmm": ("self=ABD batch1=ABC batch2=ACD", "self=D batch1=ABC batch2=ACD"),
    "addmv": ("self=A mat=AB vec=B",),
    "outer": ("self=A vec2=B",),
    "ger": ("self=A vec2=B",),
    "grouped_mm": ("mat_a=AB mat_b=CBD offs=C",),
    "_grouped_mm": ("self=AB mat2=CBD offs=C",),
    "scaled_dot_product_attention": ("query=ABCD key=ABED value=ABED attn_mask=CE",
                                     "query=BCD key=BED value=BED"),
    "conv1d": ("input=ABC weight=DBE bias=D",),
    "conv2d": ("input=ABCC weight=DBEE bias=D", "input=BCC weight=DBEE bias=D"),
    "conv3d": ("input=ABCCC weight=DBEEE bias=D",),
    "conv_transpose1d": ("input=ABC weight=BDE bias=D",),
    "conv_transpose2d": ("input=ABCC weight=BDEE bias=D",),
    "conv_transpose3d": ("input=ABCCC weight=BDEEE bias=D",),
    **{f"{kind}_pool{n}d{tail}": (f"self=AB{'CDE'[:n]} input=AB{'CDE'[:n]}",
                                  f"self=A{'CDE'[:n]} input=A{'CDE'[:n]}")
       for kind in ("max", "avg", "adaptive_max", "adaptive_avg") for n in (1, 2, 3)
       for tail in ("", "_with_indices")},
    **dict.fromkeys(
        "cholesky cholesky_inverse det inverse linalg_cholesky linalg_det linalg_eigh "
        "linalg_eigvalsh linalg_inv linalg_inv_ex linalg_matrix_exp linalg_matrix_power "
        "logdet matrix_exp matrix_power slogdet linalg_slogdet".split(),
        ("self=BB A=BB input=BB", "self=ABB A=ABB input=ABB"),
    ),
    **dict.fromkeys(
        "linalg_cond linalg_matrix_rank linalg_pinv linalg_qr linalg_svd linalg_svdvals "
        "pinverse qr svd linalg_matrix_norm".split(),
        ("self=BC A=BC input=BC", "self=ABC A=ABC input=ABC"),
    ),
    "linalg_solve": ("A=BB B=BC", "A=ABB B=ABC", "A=BB B=ABC", "A=ABB B=AB"),
    "linalg_solve_triangular": ("self=BB B=BC A=BB", "self=ABB B=ABC A=ABB"),
    "linalg_multi_dot": ("tensors=AA",),
    "chain_matmul": ("matrices=AA",),
    "tensordot": ("self=ABC other=BCD a=ABC b=BCD", "self=AB other=AB a=AB b=AB"),
    "addr": ("self=AB vec1=A vec2=B", "self=B vec1=A vec2=B"),
    "addbmm": ("self=BD batch1=ABC batch2=ACD", "self=D batch1=ABC batch2=ACD"),
    "bilinear": ("input1=AB input2=AC weight=DBC bias=D",),
    "cross": ("self=A3 other=A3", "self=3A other=3A"),
    "linalg_cross": ("self=A3 other=A3", "self=AB3 other=AB3", "self=A3 other=13"),
    "cosine_similarity": ("x1=AB x2=AB", "x1=ABC x2=ABC", "x1=AB x2=1B"),
    "pairwise_distance": ("x1=AB x2=AB", "x1=B x2=B"),
    "cdist": ("x1=ABC x2=ADC", "x1=BC x2=DC", "x1=ABC x2=DC"),
    "diagonal": ("self=AB", "self=ABC"), "linalg_diagonal": ("A=AB", "A=ABC"),
    "view_as_complex": ("self=AB2", "self=A2", "self=2"),
    "glu": ("input=A4", "input=4A", "self=A4", "self=4A"),
    "bucketize": ("self=AB boundaries=C", "self=A boundaries=C"),
    "searchsorted": ("sorted_sequence=C self=AB", "sorted_sequence=AC self=AB"),
    "isin": ("elements=AB test_elements=C", "elements=A test_elements=BC"),
    "masked_scatter": ("self=AB mask=AB source=AB", "self=AB mask=B source=AB"),
    "select_scatter": ("self=AB src=A", "self=AB src=B"),
    "slice_scatter": ("self=AB src=AB",),
    "prelu": ("self=AB weight=B input=AB", "self=ABC weight=B input=ABC",
              "self=AB weight=1 input=AB"),
    "triplet_margin_loss": ("anchor=AB positive=AB negative=AB",),
    "feature_dropout": ("input=ABC", "input=AB"),
    "H": ("self=AB",), "mH": ("self=AB", "self=ABC"),
    "multi_head_attention_forward": (
        "query=CA4 key=DA4 value=DA4 in_proj_weight=X4 in_proj_bias=X "
        "out_proj_weight=44 out_proj_bias=4",
    ),
    "local_response_norm": ("input=ABC", "input=ABCD"),
    **{f"lp_pool{n}d": (f"input=AB{'CDE'[:n]}",) for n in (1, 2, 3)},
    "gaussian_nll_loss": ("input=AB target=AB var=AB", "input=AB target=AB var=A"),
    "multilabel_soft_margin_loss": ("input=AB target=AB weight=B",),
    "triplet_margin_with_distance_loss": ("anchor=AB positive=AB negative=AB",),
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d"), ("input=ABCD", "input=ABC")),
    "interpolate": ("input=ABC", "input=ABCD"),
    "grid_sample": ("input=ABCD grid=AEF2",),
    "pixel_shuffle": ("self=4AB", "self=C4AB"),
    "fold": ("input=A4B",),
    "batch_norm": tuple(f"input={x} running_mean=B running_var=B weight=B bias=B"
                        for x in ("AB", "ABC", "ABCD")),
    "instance_norm": tuple(f"input={x} running_mean=B running_var=B weight=B bias=B"
                           for x in ("ABC", "ABCD")),
    "group_norm": ("input=ABC weight=B bias=B", "input=AB weight=B bias=B"),
    "layer_norm": ("input=ABC weight=C bias=C", "input=AB weight=B bias=B"),
    "rms_norm": ("input=ABC weight=C", "input=AB weight=B"),
    "cross_entropy": ("input=AB target=A weight=B", "input=ABC target=AC weight=B"),
    "nll_loss": ("input=AB self=AB target=A weight=B",),
    "embedding": ("weight=AB input=C indices=C", "weight=AB input=CD indices=CD"),
    "gather": ("self=AB index=AB", "self=AB index=CB", "self=AB index=AC",
    "self=A index=C"),
    "take_along_dim": ("self=AB indices=AB", "self=AB indices=CB", "self=AB indices=AC"),
    "index_select": ("self=AB index=C", "self=ABD index=C"),
    "index_add": ("self=AB index=C source=CB", "self=AB index=C source=AC"),
    "index_copy": ("self=AB index=C source=CB", "self=AB index=C source=AC"),
    "index_fill": ("self=AB index=C",),
    "index_put": ("self=AB indices=C values=CB", "self=A indices=C values=C"),
    "scatter": ("self=AB index=AB src=AB", "self=AB index=CB src=CB",
    "self=AB index=AC src=AC"),
    "scatter_add": ("self=AB index=AB src=AB", "self=AB index=CB src=CB"),
    "scatter_reduce": ("self=AB index=AB src=AB", "self=AB index=CB src=CB"),
    "bincount": ("self=A weights=A",),
    "multinomial": ("self=AB", "self=A"),
    "t": ("self=AB", "self=A"),
    "T": ("self=AB",),
    "orthogonal": ("tensor=AB",),
    "binary_cross_entropy": ("self=AB input=AB target=AB weight=B",),
}  # fmt: skip

EQUATIONS = (
    "ab,bc->ac", "ab,ab->a", "ab->ba", "ab->", "ab,b", "abc,acd->abd", "ab,cd->abcd",
    "ab,ab",
    "a,b->ab", "...a,ab->...b", "aab->b", "abc,c->ab", "ab,bc,cd->ad",
)  # fmt: skip

INTEGER = {
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift",
    "one_hot",
    "bitwise_right_shift", "__and__", "__or__", "__xor__", "__invert__", "__lshift__",
    "__rshift__",
    "__rand__", "__ror__", "__rxor__", "bincount", "gcd", "lcm",
}  # fmt: skip
UNIT = {
    "bernoulli", "multinomial", "binary_cross_entropy", "logit", "erfinv", "acos", "asin",
    "atanh", "arccos", "arcsin", "arctanh", "special_erfinv", "special_logit",
    "special_ndtri", "quantile", "nanquantile", "poisson",
}  # fmt: skip
TEXTS: dict[str, tuple[str, ...]] = {
    "reduction": ("sum", "mean", "none"), "reduce": ("sum", "prod", "mean", "amax", "amin"),
    "rounding_mode": ("floor", "trunc"), "approximate": ("none", "tanh"),
    "mode": ("constant", "reflect", "replicate", "circular", "fan_in", "fan_out"),
    "padding": ("same", "valid"), "padding_mode": ("zeros", "border"),
    "side": ("left", "right"), "interpolation": ("linear", "nearest", "lower"),
    "indexing": ("ij", "xy"), "norm": ("ortho", "forward", "backward"),
    "ord": ("fro", "nuc"), "nonlinearity": ("relu", "leaky_relu"),
}  # fmt: skip

# Words that one op takes in a slot, for forms that are about that slot.
ASKED_TEXTS: dict[str, tuple[str, ...]] = {
    "linalg_qr mode": ("reduced", "complete", "r"),
    **dict.fromkeys(("linalg_eigh UPLO", "linalg_eigvalsh UPLO"), ("L", "U")),
    "interpolate mode": ("nearest", "linear", "bilinear", "bicubic", "area"),
    "grid_sample mode": ("bilinear", "nearest", "bicubic"),
}

# Shapes for forms that are about a slot, where the usual ones leave it one value. A small
# letter is twice as long as the great one, and cut with it.
ASKED_SHAPES: dict[str, tuple[str, ...]] = {
    "conv1d groups": ("input=AbC weight=DBE bias=D",),
    "conv2d groups": ("input=AbCC weight=DBEE bias=D",),
    "conv3d groups": ("input=AbCCC weight=DBEEE bias=D",),
    "slice_scatter start": ("self=4B src=2B",),
    "slice_scatter step": ("self=4B src=2B",),
    "max_pool3d dilation": ("input=AB888 self=AB888",),
    "diag_embed dim2": ("self=ABC input=ABC",), "diag_embed dim1": ("self=ABC input=ABC",),
    "tensordot dims": ("self=AA other=AA a=AA b=AA",),  # of 0, 1 and 2 dims
}  # fmt: skip
# Whole numbers that such a slot takes.
ASKED_NUMBERS: dict[str, tuple[int, ...]] = {
    **{f"conv{n}d groups": (2,) for n in (1, 2, 3)}, "slice_scatter step": (2,),
}  # fmt: skip
# Slots that matter only where others are given, too.
NEEDS: dict[str, tuple[str, ...]] = {
    "count_include_pad": ("padding",), "recompute_scale_factor": ("scale_factor",),
    "start": ("step",), "momentum": ("training",),
}  # fmt: skip
# Slots that must be odd, too, for another to matter.
ODD_TOO = {"normal size": "mean"}
# Ops that take two dims, in an order that matters.
TWO_DIMS = {"rot90", "linalg_matrix_norm"}

# What an argument of a function in Python is, by its name.
BY_NAME: dict[str, str] = {
    "tensor": "Tensor", "input": "Tensor", "self": "Tensor", "other": "Tensor",
    "weight": "Tensor",
    "target": "Tensor", "bias": "Tensor", "mat_a": "Tensor", "mat_b": "Tensor",
    "offs": "Tensor",
    "pos_weight": "Tensor", "split_size": "int", "sizes": "List[int]", "dim": "int",
    "p": "number",
    "dims": "List[int]", "keepdim": "bool", "pad": "List[int]",
    "split_size_or_sections": "int",
    "eps": "float", "value": "float", "mode": "str", "reduction": "str",
    "descending": "bool",
    "k": "int", "shape": "List[int]", "ord": "number", "alpha": "float", "beta": "float",
    "inplace": "bool", "training": "bool", "a": "float", "b": "float", "mean": "float",
    "std": "float", "gain": "float", "nonlinearity": "str", "normalized_shape": "List[int]",
    "threshold": "float", "label_smoothing": "float", "ignore_index": "int",
    "delta": "float",
    "stable": "bool", "negative_slope": "float", "min_val": "float", "max_val": "float",
    "padding_idx": "int", "size_average": "bool", "reduce": "bool",
    "max_norm": "float", "scale_grad_by_freq": "bool", "as_tuple": "bool",
    "kernel_size": "int", "num_groups": "int", "stride": "int",
    "padding": "int", "dilation": "int", "output_size": "int", "ceil_mode": "bool",
    "return_indices": "bool", "scale_factor": "float", "align_corners": "bool",
    "grid": "Tensor", "padding_mode": "str", "running_mean": "Tensor",
    "running_var": "Tensor", "use_input_stats": "bool", "momentum": "float",
    "groups": "int", "antialias": "bool", "input1": "Tensor", "input2": "Tensor",
    "anchor": "Tensor", "positive": "Tensor", "negative": "Tensor", "margin": "float",
    "log_target": "bool", "log_input": "bool", "full": "bool", "swap": "bool",
    "var": "Tensor", "x1": "Tensor", "x2": "Tensor", "n_fft": "int", "window": "Tensor",
    "return_complex": "bool", "hop_length": "int", "norm_type": "float", "lower": "float",
    "upper": "float", "logits": "Tensor", "tau": "float", "hard": "bool",
    "recompute_scale_factor": "bool", "size": "int", "return_inverse": "bool",
    "return_counts": "bool",
}  # fmt: skip
