"""A check of the fast path against the slow oracle on the user's own model and a few records that
are not private.
"""

from __future__ import annotations

from torch import nn

from quietgrad.clipping.capture.backward import PerExampleLoss
from quietgrad.clipping.clipper import Clipper
from quietgrad.clipping.engines.work import Engine
from quietgrad.clipping.soundness.company.quantized import in_evaluation_mode
from quietgrad.clipping.soundness.oracle import oracle_clipped_sum, oracle_gradients, oracle_norms
from quietgrad.tensors import Batch


def verify_clipping(
    model: nn.Module,
    per_example_loss: PerExampleLoss,
    batch: Batch,
    engine: Engine = "bookkeeping",
) -> float:
    """Largest relative difference between the exact path and per-example autograd, over norms
    and the clipped sum.

    Args:
        model: the model to train; checked in evaluation mode, so that dropout draws nothing, and
            put back.
        per_example_loss: (model, batch) -> [examples].
        batch: two or more records that are *not* private: the result is meant to be looked at.
        engine: that is looked at; "auto" is "bookkeeping" here.

    Returns:
        About 1e-6 in float32. A large value means that some layer's per-example gradients are
        captured wrongly: do not train.
    """
    with in_evaluation_mode(model):
        gradients = oracle_gradients(model, per_example_loss, batch)
        norms = oracle_norms(gradients)
        clip = max(float(norms.mean()), 1e-12)
        expected = oracle_clipped_sum(gradients, clip)
        chosen: Engine = "bookkeeping" if engine == "auto" else engine
        bound = Clipper(clip, engine=chosen).bind(model, per_example_loss)
        fast_norms = bound.norms(batch, step=0).double().to(norms.device)
        actual = bound.clip(batch, step=0).gradients
    worst = float(((fast_norms - norms).abs() / norms.clamp_min(1e-12)).max())
    size = max(float(sum(g.double().pow(2).sum() for g in expected.values())) ** 0.5, 1e-12)
    difference = (
        float(sum((actual[n].double() - g.double()).pow(2).sum() for n, g in expected.items()))
        ** 0.5
    )
    return max(worst, difference / size)
