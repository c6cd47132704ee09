"""Rows: more ops that work element by element, and complex numbers."""

from functools import partial

from placements.inference.flows import (
    arrangements,
    elementwise,
    random,
    reductions,
    spectra,
)
from placements.inference.op import Row
from placements.inference.padding import KEEPS
from placements.inference.rules import LINEAR, NO_VALUES, NONLINEAR

_ELEMENT = "each element by itself, but f(a + b) is not f(a) + f(b)"
_DRAWN = "drawn numbers, which ranks share only if the caller says so"
_SPECTRUM = "every element is a sum over all others along the dims"
_ALONG = "a transform needs the whole dim, and this rank holds a piece of it"
_NORM = "flag norm"

ROWS: tuple[Row, ...] = (
    Row("elementwise",
        "angle arccos arccosh arctan2 copysign digamma frexp gcd "
        "heaviside i0 igamma igammac isreal lcm ldexp logaddexp2 mvlgamma "
        "nextafter polygamma special_airy_ai special_bessel_j0 "
        "special_bessel_y0 special_bessel_y1 special_digamma special_erfc special_erfcx "
        "special_erfinv special_exp2 special_gammainc special_gammaincc special_gammaln "
        "special_i0 special_i0e special_log_ndtr special_logit special_ndtr "
        "special_ndtri special_polygamma special_psi special_sinc "
        "special_xlogy special_zeta",
        NONLINEAR, elementwise.pointwise, "value *", _ELEMENT),
    Row("elementwise",
        "arcsin arcsinh arctan arctanh fix hardshrink softshrink special_bessel_j1 "
        "special_erf special_expm1 special_i1 special_i1e special_log1p special_round",
        NONLINEAR, elementwise.pointwise, "value *", f"{_ELEMENT}; zeros stay zero",
        zeros=KEEPS),
    Row("elementwise", "prelu", NONLINEAR, elementwise.by_channel,
        "value input weight",
        "each element by itself, with a slope for each channel"),
    Row("elementwise", "deg2rad rad2deg", LINEAR, elementwise.each, "value input",
        "linear"),
    Row("complex numbers", "real imag conj conj_physical resolve_conj resolve_neg",
        LINEAR, elementwise.same, "value input",
        "a part of each number; the part of a sum is the sum of the parts"),
    Row("complex numbers", "complex", LINEAR, elementwise.pointwise, "value real imag",
        "a number of two parts, linear in both together"),
    Row("complex numbers", "polar", NONLINEAR, elementwise.pointwise, "value abs angle",
        "a number of its length and its angle"),
    Row("complex numbers", "view_as_complex", LINEAR, spectra.of_pairs, "value input",
        "pairs along the last dim become numbers"),
    Row("complex numbers", "view_as_real", LINEAR, spectra.to_pairs, "value input",
        "numbers become pairs along a new last dim"),
    Row("complex numbers", "cfloat cdouble", LINEAR, elementwise.to_float, "value input",
        "the same values", overwrites=True, copies=True),
    Row("spectra", "fft_fft fft_rfft fft_irfft fft_hfft", LINEAR,
        partial(spectra.anew_along, dim=-1), f"value input; flag n; dim dim; {_NORM}",
        _SPECTRUM, along=_ALONG),
    Row("spectra", "fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2", LINEAR,
        partial(spectra.anew_along, dim=(-2, -1)),
        f"value input; flag s; dim dim; {_NORM}", _SPECTRUM, along=_ALONG),
    Row("spectra", "fft_fftn fft_ifftn fft_rfftn fft_irfftn", LINEAR, spectra.anew_along,
        f"value input; flag s; dim dim; {_NORM}", _SPECTRUM, along=_ALONG),
    Row("spectra", "fft_fftshift fft_ifftshift", LINEAR, spectra.anew_along,
        "value input; dim dim", "elements change places along the dims", along=_ALONG),
    Row("along a dim", "diff", LINEAR, arrangements.difference,
        "value input prepend append; flag n; dim dim",
        "the difference of neighbours is linear"),
    Row("along a dim", "glu", NONLINEAR, partial(spectra.anew_along, dim=-1),
        "value input; dim dim",
        "the first half of the dim, gated by the second",
        along="the two halves of a piece are not the halves of the whole dim"),
    *(Row("along a dim", name, LINEAR, partial(reductions.moved_along, dims=dim),
          "value input", "elements change places along the dim",
          along="elements would change places within each piece only")
      for name, dim in (("fliplr", 1), ("flipud", 0))),
    Row("along a dim", "rot90", LINEAR, arrangements.turned,
        "value input; flag k; dim dims", "elements change places along the dims",
        along="elements would change places within each piece only"),
    Row("along a dim", "unique_consecutive", NONLINEAR, arrangements.distinct,
        "value input; flag return_inverse return_counts dim",
        "elements that are not equal to the one before",
        forgets="how many elements of a piece are distinct only its rank knows"),
    Row("counting", "bucketize", NONLINEAR, arrangements.bucketed,
        "value input boundaries; flag out_int32 right",
        "how many bounds are below each element"),
    Row("counting", "searchsorted", NONLINEAR, arrangements.bucketed,
        "value boundaries/sorted_sequence input; flag out_int32 right side",
        "how many bounds are below each element"),
    Row("counting", "isin", NONLINEAR, arrangements.is_among,
        "value elements/element test_elements/test_element; flag assume_unique invert",
        "each element by itself, among all of another tensor"),
    Row("random", "cauchy log_normal", NO_VALUES, random.like,
        "value input; flag median sigma mean std", _DRAWN, takes="shared",
        overwrites=True),
    Row("random", "feature_dropout", LINEAR,
        random.drops_channels, "value input; flag p training/train",
        "a product with a random mask of the channels of each sample", takes="shared"),
)  # fmt: skip
