"""Public data to a Hessian spectrum, with provenance. Nothing here may see private records: what it
computes is used without noise.
"""

from quietgrad.curvature.lanczos import TopEigenvalues, top_eigenvalues
from quietgrad.curvature.operators import CurvatureOperator
from quietgrad.curvature.quadrature import PositivePart, positive_part
from quietgrad.curvature.spectrum import Spectrum, load_spectrum
from quietgrad.curvature.tail import automatic_tail_index, extend_spectrum

__all__ = [
    "CurvatureOperator",
    "PositivePart",
    "Spectrum",
    "TopEigenvalues",
    "automatic_tail_index",
    "extend_spectrum",
    "load_spectrum",
    "positive_part",
    "top_eigenvalues",
]
