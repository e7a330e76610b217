"""Per-example losses to a ``ClippedSum`` and the sensitivity it claims."""

from quietgrad.clipping.api import clipped_gradients, per_example_norms
from quietgrad.clipping.bound import BoundClipper
from quietgrad.clipping.capture.examples import UserBatch
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.clipping.clipper import Clipper
from quietgrad.clipping.norms.factors import DenseFactors, DirectGradients
from quietgrad.clipping.norms.factors.sums.elementwise import sum_over_positions
from quietgrad.clipping.norms.rules.own import add_layer_rule
from quietgrad.clipping.settings import Clipping, Performance
from quietgrad.clipping.soundness.refusals import refuse_cross_example_layers, replace_batch_norm

__all__ = [
    "BoundClipper",
    "ClippedSum",
    "Clipper",
    "Clipping",
    "DenseFactors",
    "DirectGradients",
    "Performance",
    "UserBatch",
    "add_layer_rule",
    "clipped_gradients",
    "per_example_norms",
    "refuse_cross_example_layers",
    "replace_batch_norm",
    "sum_over_positions",
]
