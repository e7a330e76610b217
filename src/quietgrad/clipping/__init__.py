"""Per-example losses to a ``ClippedSum`` and the sensitivity it claims."""

from quietgrad.clipping.api import clipped_gradients, per_example_norms
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.clipping.engine import Clipper
from quietgrad.clipping.refusals import refuse_cross_example_layers, replace_batch_norm

__all__ = [
    "ClippedSum",
    "Clipper",
    "clipped_gradients",
    "per_example_norms",
    "refuse_cross_example_layers",
    "replace_batch_norm",
]
