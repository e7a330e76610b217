"""Seconds of a step, from stated peaks, bandwidths and links (``devices``), part by part.

Products run at the stated share of the peak; what reads and writes memory at its bandwidth; what
is sent at the slowest link's. Nothing of it is measured: on a device at hand time a step and set
``efficiency`` to what it reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quietgrad.clipping.norms.choice import ESTIMATOR_OF, Policy
from quietgrad.clipping.norms.cost import Cost, Throughput, seconds
from quietgrad.clipping.planner.tracing import ModelTrace
from quietgrad.scaling.paper.micro_batch import Paper
from quietgrad.scaling.ways.devices import Device

# Normal numbers an entry: drawn and written, then read, added to the sum, which is read and
# written. A Philox draw is some 50 operations, less than the memory traffic on a GPU.
NOISE_TOUCHES = 4
DRAW_OPERATIONS = 50.0
ADAM_TOUCHES = 7  # weight, gradient and two moments read, weight and two moments written


@dataclass(frozen=True)
class Norms:
    """What norms of one micro-batch cost over the plain step.

    Attributes:
        multiplications: of all parameters.
        seconds: modelled, as the planner does.
        kept: bytes of per-example gradients that are kept in place of factors.
        ways: estimator -> parameters that take it.
    """

    multiplications: float
    seconds: float
    kept: float
    ways: Mapping[str, int]


def norms_of(trace: ModelTrace, policy: Policy, examples: int, speed: Throughput) -> Norms:
    """By the planner's own choices.

    Args:
        trace: the model.
        policy: how estimators are chosen, by the stated speeds that a run chooses by.
        examples: of the micro-batch.
        speed: of the device.
    """
    found: dict[tuple[Cost, Policy], tuple[float, float, float, str]] = {}
    work = time = kept = 0.0
    ways: dict[str, int] = {}
    for parameter in trace.parameters:
        cost = parameter.cost_for(examples)
        if cost is None:
            continue
        known = cost, policy.for_shape(parameter.shape)
        if known not in found:
            choice = known[1].choose(cost)
            way = ESTIMATOR_OF[choice.estimator]
            spent = seconds(way, cost, choice.kept, choice.sketch_dim, speed)
            made = 0.0 if choice.kept else way.multiplications(cost, choice.sketch_dim)
            found[known] = made, spent, 4.0 * cost.gradient_entries * choice.kept, choice.estimator
        made, spent, memory, name = found[known]
        work, time, kept = work + made, time + spent, kept + memory
        ways[name] = ways.get(name, 0) + 1
    return Norms(work, time, kept, ways)


def computing(paper: Paper, examples: int, device: Device, share: float) -> dict[str, float]:
    """Forward, backward and weighted product of so many examples.

    The weighted product is a weight gradient's work, once for weights of float32, twice for half
    precision: clip factors need two products of it (``clipping.norms.factors.products``).
    """
    speed = device.peak * share / 2
    halves = max(p.item for p in paper.parameters) < 4
    return {
        "forward and backward": examples * paper.trace.multiplications / speed,
        "weighted product": examples
        * paper.trace.weight_multiplications
        * (2 if halves else 1)
        / speed,
    }


def noise_seconds(entries: float, bands: int, rows: bool, step: float, device: Device) -> float:
    """Of one device's share of the noise.

    Args:
        entries: that it draws.
        bands: b.
        rows: whether earlier rows are kept; else all of the steps before are drawn again.
        step: number of the step, for that.
        device: whose.
    """
    draw = max(4.0 / device.bandwidth, DRAW_OPERATIONS / device.peak_float32)
    add = 4.0 * (NOISE_TOUCHES - 1) / device.bandwidth
    if bands == 1:
        return entries * (draw + add)
    if rows:
        return entries * (draw + add + (bands - 1) * 12.0 / device.bandwidth)
    return entries * ((step + 1) * (draw + 12.0 / device.bandwidth) + add)


def optimiser_seconds(weight_bytes: float, device: Device) -> float:
    """An AdamW step over weights of so many bytes."""
    return ADAM_TOUCHES * weight_bytes / device.bandwidth
