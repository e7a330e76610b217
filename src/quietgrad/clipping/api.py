"""The two functions that most users of the clipping room need."""

from __future__ import annotations

from torch import Tensor, nn

from quietgrad.checks import require_word
from quietgrad.clipping.capture.backward import PerExampleLoss
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.clipping.clipper import Clipper
from quietgrad.clipping.norms.choice import DEFAULT_SKETCH_DIM, ESTIMATORS
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.tensors import Batch


def clipped_gradients(
    model: nn.Module,
    per_example_loss: PerExampleLoss,
    batch: Batch,
    max_grad_norm: float,
    estimator: str = "auto",
    sketch_dim: int = DEFAULT_SKETCH_DIM,
    *,
    physical_batch_size: int | None = None,
    projections: Projections | None = None,
) -> ClippedSum:
    """Sum over the batch of per-example gradients, each clipped to norm ``max_grad_norm`` over all
    trainable parameters together.

    Args:
        model: any module without cross-example layers; left as it was found.
        per_example_loss: (model, batch) -> [examples].
        batch: nested containers of tensors with the example as first dimension; an empty batch
            gives zeros.
        max_grad_norm: C, above 0.
        estimator: "auto" or "exact" (cheapest exact norm per layer), "materialized", "ghost",
            "hutch" or "hutch++". The last two are
            randomized: their claim carries the sketch dimension, and the accountant must use it.
        sketch_dim: k of the sketches, at least 2.
        physical_batch_size: examples per forward pass; None takes the batch whole.
        projections: random projections of sketches; the parts of one batch need the same. None
            draws fresh ones.

    Returns:
        ``ClippedSum``: ``.gradients`` maps parameter names to sums, ``.claim`` states the
            sensitivity. Private until noise is added.

    Raises:
        ValueError: naming the layer, parameter or argument, with the remedy.
    """
    clipper = Clipper(
        max_grad_norm,
        require_word("estimator", estimator, ESTIMATORS),
        sketch_dim,
        physical_batch_size,
    )
    return clipper.clip(model, per_example_loss, batch, projections)


def per_example_norms(
    model: nn.Module,
    per_example_loss: PerExampleLoss,
    batch: Batch,
    estimator: str = "exact",
    sketch_dim: int = DEFAULT_SKETCH_DIM,
    *,
    physical_batch_size: int | None = None,
    projections: Projections | None = None,
) -> Tensor:
    """[examples] norms (not squared) of the per-example gradients over all trainable parameters
    together. Private.

    Arguments and errors as for ``clipped_gradients``.
    """
    clipper = Clipper(
        1.0, require_word("estimator", estimator, ESTIMATORS), sketch_dim, physical_batch_size
    )
    return clipper.norms(model, per_example_loss, batch, projections)
