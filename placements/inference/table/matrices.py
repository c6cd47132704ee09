"""Rows: linear algebra, diagonals, and products and distances of more than matmul."""

from functools import partial

from placements.inference.flows import matrices, reductions
from placements.inference.op import SUM, Row
from placements.inference.rules import LINEAR, MULTILINEAR, NONLINEAR

_EACH = "every matrix of the last two dims by itself"
_PLACE = "where an element goes depends on its place in both dims"
_WHOLE = "it needs whole vectors, and this rank holds a piece of each"

ROWS: tuple[Row, ...] = (
    Row("matrices",
        "cholesky cholesky_inverse det inverse linalg_cholesky linalg_cond linalg_det "
        "linalg_eigh linalg_eigvalsh linalg_inv linalg_inv_ex linalg_matrix_exp "
        "linalg_matrix_power linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet "
        "linalg_svd linalg_svdvals logdet matrix_exp matrix_power pinverse qr slogdet svd",
        NONLINEAR, matrices.each,
        "value input/A; flag n p mode full_matrices UPLO upper check_errors atol rtol tol "
        "rcond hermitian driver some compute_uv", _EACH),
    Row("matrices", "linalg_solve linalg_solve_triangular", NONLINEAR, matrices.solved,
        "value input/A other/B; flag upper left unitriangular",
        "every matrix by itself; linear in the right sides"),
    Row("matrices", "linalg_matrix_norm", NONLINEAR,
        partial(reductions.reduction, dim=(-2, -1)),
        "value input/A; flag ord; dim dim; flag keepdim; dtype dtype",
        "the norm of a sum is not the sum of norms", along=_WHOLE),
    Row("matrix products", "linalg_multi_dot chain_matmul", MULTILINEAR, matrices.multi_dot,
        "value tensors/matrices",
        "as matmul, one after the other"),
    Row("matrix products", "tensordot", MULTILINEAR, matrices.tensordot,
        "value a/self b/other; flag dims",
        "named dims are contracted"),
    Row("matrix products", "addr", MULTILINEAR, matrices.outer_added,
        "value input vec1 vec2; flag beta alpha",
        "as outer; the added tensor is a term of a sum"),
    Row("matrix products", "addbmm", MULTILINEAR, matrices.products_added,
        "value input batch1 batch2; flag beta alpha",
        "as bmm, summed over the batch; the added tensor is a term of a sum"),
    Row("matrix products", "bilinear", MULTILINEAR, matrices.bilinear,
        "value input1 input2 weight bias",
        "linear in each factor; a bias is a term of a sum"),
    Row("matrix products", "cross", MULTILINEAR, matrices.cross,
        "value input other; dim dim",
        "linear in each factor; of vectors along a dim", along=_WHOLE),
    Row("matrix products", "linalg_cross", MULTILINEAR, partial(matrices.cross, dim=-1),
        "value input other; dim dim",
        "linear in each factor; of vectors along a dim", along=_WHOLE),
    Row("matrix products", "linalg_vecdot", MULTILINEAR, matrices.compared,
        "value input/x other/y; dim dim",
        "a contraction over the dim", along=SUM),
    Row("distances", "cosine_similarity", NONLINEAR, partial(matrices.compared, dim=1),
        "value input/x1 other/x2; dim dim; flag eps",
        "of vectors along a dim", along=_WHOLE),
    Row("distances", "pairwise_distance", NONLINEAR, matrices.compared,
        "value input/x1 other/x2; flag p eps keepdim",
        "of vectors along the last dim", along=_WHOLE),
    Row("distances", "cdist", NONLINEAR, matrices.distances,
        "value input/x1 other/x2; flag p compute_mode",
        "of every vector of the one with every vector of the other"),
    Row("diagonals", "diagonal", LINEAR, matrices.diagonal,
        "value input; flag offset; dim dim1 dim2", _PLACE),
    Row("diagonals", "linalg_diagonal", LINEAR,
        partial(matrices.diagonal, dim1=-2, dim2=-1),
        "value input/A; flag offset; dim dim1 dim2", _PLACE),
    Row("diagonals", "diag_embed", LINEAR, matrices.diagonal_embedded,
        "value input; flag offset; dim dim1 dim2", _PLACE),
)  # fmt: skip
