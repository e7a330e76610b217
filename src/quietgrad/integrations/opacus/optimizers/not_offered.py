"""Attributes of Opacus' optimiser that stand for its way of clipping, and what there is instead."""

from __future__ import annotations

from quietgrad.integrations.opacus.grad_sample.no_grad_sample import BY_RECORD

_BY_STEP = "optimizer.step() clips, adds the noise and steps; call it alone"
NOT_OFFERED = {
    "grad_samples": BY_RECORD,
    "summed_grad": BY_RECORD,
    "clip_and_accumulate": _BY_STEP,
    "add_noise": _BY_STEP,
    "scale_grad": _BY_STEP,
    "accumulated_iterations": "batches never add up; BatchMemoryManager cuts one in parts",
    "virtual_step": "it is of Opacus before 1.0; BatchMemoryManager cuts a batch in parts",
    "generator": "noise is drawn from streams of Quietgrad's own, seeded by the operating system",
}


def missing(name: str) -> AttributeError:
    """What to say of an attribute that the optimiser does not have."""
    said = f"DPOptimizer has no {name!r}"
    return AttributeError(f"{said}: {NOT_OFFERED[name]}" if name in NOT_OFFERED else said)
