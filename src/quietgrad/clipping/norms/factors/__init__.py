"""Per-example gradients in factored form: what a layer's rule hands to the norm estimators and to
the weighted sum.
"""

from quietgrad.clipping.norms.factors.convolution import ConvolutionFactors
from quietgrad.clipping.norms.factors.dense import DenseFactors
from quietgrad.clipping.norms.factors.direct import DirectGradients, ListedGradients, SummedRows
from quietgrad.clipping.norms.factors.extents import ByExtent, by_extent
from quietgrad.clipping.norms.factors.matrix import (
    BLOCK_ELEMENTS,
    Kept,
    MatrixFactors,
    Sizes,
    Unfolded,
)
from quietgrad.clipping.norms.factors.one_hot import OneHotFactors
from quietgrad.clipping.norms.factors.patches import Geometry

Contribution = MatrixFactors | DirectGradients
Given = Contribution | SummedRows  # by a rule


def formed(given: Given) -> Contribution:
    """With sums of rows added up."""
    return given.formed() if isinstance(given, SummedRows) else given


__all__ = [
    "BLOCK_ELEMENTS",
    "ByExtent",
    "Contribution",
    "ConvolutionFactors",
    "DenseFactors",
    "DirectGradients",
    "Geometry",
    "Given",
    "Kept",
    "ListedGradients",
    "MatrixFactors",
    "OneHotFactors",
    "Sizes",
    "SummedRows",
    "Unfolded",
    "by_extent",
    "formed",
]
