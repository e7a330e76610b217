"""Sketched norms of a real model's gradients against the envelope that the accountant uses, where
they come closest to it: at rank one.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from cases import CASES

from quietgrad.accounting import envelope_cdf
from quietgrad.clipping import Clipper
from quietgrad.clipping.norms.choice import SKETCHES
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.events import RandomizedClipping
from quietgrad.randomness import RandomKey

DRAWS = 400
# Dvoretzky-Kiefer-Wolfowitz: an empirical distribution of so many draws is further off than this
# once in a million tests.
MARGIN = math.sqrt(math.log(2 / 1e-6) / (2 * DRAWS))


@cache
def ratios(estimator: str, k: int) -> np.ndarray:
    """R = estimate / truth, squared, for one example whose gradient has rank one: two tokens, one
    prediction, one trainable matrix.
    """
    model, loss, batch = next(c for c in CASES if c.name == "llama").build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "model.layers.1.mlp.down_proj.weight")
    one = {name: value[:1, :2] if value.dim() > 1 else value[:1] for name, value in batch.items()}
    gradient = Clipper(1e9).clip(model, loss, one).gradients["model.layers.1.mlp.down_proj.weight"]
    values = torch.linalg.svdvals(gradient)
    assert values[1] < 1e-5 * values[0]
    bound = Clipper(1.0, estimator, k, engine="bookkeeping").bind(model, loss)
    key = RandomKey.from_seed(17)
    drawn = [float(bound.norms(one, Projections(key, step), step)) for step in range(DRAWS)]
    return (np.array(drawn) / float(gradient.norm())) ** 2


def stays_below(found: np.ndarray, k: int) -> bool:
    """Whether the empirical distribution of R lies below the mixed envelope's, up to the margin."""
    at = np.sort(found) * (1 + 1e-5)  # Hutch++ is exact here, to rounding
    empirical = np.arange(1, len(at) + 1) / len(at)
    return bool((empirical <= np.asarray(envelope_cdf(RandomizedClipping(k), at)) + MARGIN).all())


@pytest.mark.grid(1, "two sketches; Hutch++ is exact at rank one, and has tests of its own")
@pytest.mark.statistical
@pytest.mark.parametrize("estimator", SKETCHES)
def test_ratios_stay_below_the_envelope(estimator: str) -> None:
    """False alarms: once in a million."""
    assert stays_below(ratios(estimator, 8), 8)


@pytest.mark.statistical
def test_a_claim_of_more_projections_than_were_drawn_is_noticed() -> None:
    found = ratios("hutch", 8)
    assert not stays_below(found, 32)
    assert float(found.std()) == pytest.approx(math.sqrt(2 / 8), rel=0.15)
