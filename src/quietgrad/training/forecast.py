"""What a run would do and cost, from one micro-batch of validation records, which are declared
public.
"""

from __future__ import annotations

from typing import Any

import torch

from quietgrad.clipping.layer_overrides import claim_of
from quietgrad.clipping.norms.choice import Estimator
from quietgrad.clipping.planner.explain import TEXTS, explain
from quietgrad.events import RandomizedClipping
from quietgrad.plan import PrivacyPlan
from quietgrad.training.prepare import Prepared
from quietgrad.training.result import facts_of


def forecast(prepared: Prepared) -> dict[str, Any]:
    """Estimator per shape of parameter, predicted time and memory, and the privacy facts. Trains
    nothing.

    Returns:
        A record for ``quietgrad plan``; times are of this machine, right now.
    """
    sample = prepared.sample()
    clipping: dict[str, Any] = {"engine": "plain autograd", "layers": []}
    if prepared.plan is not None:
        batch = sample.as_clipped(prepared.combined is not None)
        clipping = explain(prepared.plan.clipper, sample.model, prepared.loss(), batch)
        for sketch in clipping["sketches"]:
            sketch |= _noise_of_a_sketch(prepared.plan, sketch["estimator"], sketch["sketch_dim"])
    machine = prepared.measured(sample)
    examples = prepared.expected_batch_size * prepared.steps
    seconds = machine.before + machine.seconds * examples
    return {
        **facts_of(prepared),
        "steps": prepared.steps,
        "expected_batch_size": prepared.expected_batch_size,
        **clipping,
        "predicted_seconds": seconds,
        "hours_allowed": prepared.config.training.hours,
        "cached_frozen_layers": sample.cached,
        "predicted_memory_mib": _memory_mib(prepared, clipping),
        "parameters": sum(p.numel() for p in prepared.model.classifier.parameters()),
    }


def kept_forecast(prepared: Prepared) -> dict[str, Any]:
    """Of ``forecast``, what a run's directory keeps and its report shows: engine, estimator per
    shape of parameter, time and memory as they were expected.

    What a run really took is not kept: time and peak memory follow from the sizes of batches, which
    are private. Nor is how many examples were to run together, which may follow from the memory
    that private records left free. What is kept was measured on public records.
    """
    found = forecast(prepared)
    layers = [
        {key: layer[key] for key in ("shape", "count", "estimator", "kept")}
        for layer in found["layers"]
    ]
    names = ("engine", "cached_frozen_layers", "predicted_seconds", "predicted_memory_mib")
    return {**{name: found[name] for name in names}, "layers": layers}


def _noise_of_a_sketch(
    plan: PrivacyPlan, estimator: Estimator, sketch_dim: int
) -> dict[str, float]:
    """The noise multiplier that sketched norms would need for the same guarantee; nothing where the
    multiplier was given.
    """
    if isinstance(plan.event.clipping, RandomizedClipping):
        return {}
    claim = claim_of(estimator, sketch_dim, (), "auto")
    sigma = plan.multiplier_for(clipping=claim)
    return {} if sigma is None else {"noise_multiplier": sigma}


def _memory_mib(prepared: Prepared, clipping: dict[str, Any]) -> float:
    """On a GPU the peak so far, of public records; on a processor weights and a modelled step. What
    the process holds there holds the private records too, and would tell how large they are.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    model = prepared.model.classifier
    held = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    engines = clipping.get("alternatives", ())
    step = [row["mib"] for row in engines if TEXTS[row["engine"]] == clipping["engine"]]
    return held / 2**20 + sum(step)
