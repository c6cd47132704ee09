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
    "__rand__", "__ror__", "__rxor__", "bincount",
}  # fmt: skip
UNIT = {
    "bernoulli", "multinomial", "binary_cross_entropy", "logit", "erfinv", "acos", "asin",
    "atanh",
}  # fmt: skip
TEXTS: dict[str, tuple[str, ...]] = {
    "reduction": ("sum", "mean", "none"), "reduce": ("sum", "prod", "mean", "amax", "amin"),
    "rounding_mode": ("floor", "trunc"), "approximate": ("none", "tanh"),
    "mode": ("constant", "reflect", "replicate", "circular", "fan_in", "fan_out"),
    "ord": ("fro", "nuc"), "nonlinearity": ("relu", "leaky_relu"),
}  # fmt: skip
