"""What a run would do and cost, from one micro-batch of validation records, which are declared
public.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import nn

from quietgrad.clipping.bound import BoundClipper
from quietgrad.clipping.capture.backward import PerExampleLoss
from quietgrad.clipping.capture.examples import UserBatch
from quietgrad.clipping.planner.explain import TEXTS, explain
from quietgrad.events import RandomizedClipping
from quietgrad.plan import PrivacyPlan
from quietgrad.tensors import batch_size_of
from quietgrad.training.prepare import Prepared
from quietgrad.training.result import facts_of


def forecast(prepared: Prepared) -> dict[str, Any]:
    """Estimator per shape of parameter, predicted time and memory, and the privacy facts. Trains
    nothing.

    Returns:
        A record for ``quietgrad plan``; times are of this machine, right now.
    """
    config = prepared.config
    size = min(config.physical_batch_size, len(prepared.validation))
    typical = prepared.validation.subset(prepared.validation.middle(size))
    prefix_seconds, loss = 0.0, prepared.loss()
    model: nn.Module
    started = time.perf_counter()
    cache = prepared.prefix_cache(typical)
    if cache is None:
        model = prepared.model.classifier
        batch = typical.collate(np.arange(size), prepared.device)
    else:
        prefix_seconds = (time.perf_counter() - started) / size * _records_to_cache(prepared)
        model = cache.upper
        batch = cache.collate(np.arange(size), prepared.device)
    clipping: dict[str, Any] = {"engine": "plain autograd", "layers": []}
    if prepared.plan is not None:
        clipping = explain(prepared.plan.clipper, model, loss, _as_clipped(prepared, batch))
        clipping["sketch"] |= _noise_of_a_sketch(prepared.plan)
    bound = None if prepared.plan is None else prepared.plan.clipper.bind(model, loss)
    # The guard looks at the first one, and at one of five hundred later.
    seconds = min(_timed_step(prepared, bound, model, loss, batch) for _ in range(3))
    examples = prepared.expected_batch_size * prepared.steps
    if prepared.combined is not None:  # how many records users have is private: at most so many
        examples *= prepared.config.users.records_per_user
    return {
        **facts_of(prepared),
        "steps": prepared.steps,
        "expected_batch_size": prepared.expected_batch_size,
        **clipping,
        "predicted_seconds": prefix_seconds + seconds / size * examples,
        "cached_frozen_layers": cache is not None,
        "predicted_memory_mib": _memory_mib(prepared, clipping),
        "parameters": sum(p.numel() for p in prepared.model.classifier.parameters()),
    }


def _records_to_cache(prepared: Prepared) -> int:
    """As many as are stated. How many all users have is private, and a time would tell it: what is
    counted is users at the cap.
    """
    if prepared.combined is None:
        return len(prepared.train)
    return prepared.sampler.dataset_size * prepared.config.users.records_per_user


def _noise_of_a_sketch(plan: PrivacyPlan) -> dict[str, float]:
    """The noise multiplier that sketched norms would need for the same guarantee; nothing where the
    multiplier was given.
    """
    if isinstance(plan.event.clipping, RandomizedClipping):
        return {}
    sigma = plan.multiplier_for(clipping=RandomizedClipping(plan.clipper.sketch_dim))
    return {} if sigma is None else {"noise_multiplier": sigma}


def _timed_step(
    prepared: Prepared,
    bound: BoundClipper | None,
    model: nn.Module,
    loss: PerExampleLoss,
    batch: dict[str, torch.Tensor],
) -> float:
    started = time.perf_counter()
    if bound is not None:
        bound.clip(_as_clipped(prepared, batch), step=2)
    else:
        loss(model, batch).sum().backward()
        model.zero_grad()
    if prepared.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _as_clipped(prepared: Prepared, batch: dict[str, torch.Tensor]) -> Any:
    """Public records as the clipper takes them: where users are protected, one of each user."""
    if prepared.combined is None:
        return batch
    return UserBatch(batch, (1,) * batch_size_of(batch))


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
