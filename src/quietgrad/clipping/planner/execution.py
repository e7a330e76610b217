"""Engine and micro-batch size for a whole model, by modelled time under a memory budget, with the
reasons.

Memory is modelled as what autograd keeps, plus what the engine keeps, plus gradients and sums; time
as the non-private step at the speed that the micro-batch's rows allow, plus the engine's extra
work. Without a budget, a step may take what is free, but no more than a non-private step on the
whole batch would (or 64 MiB).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from quietgrad.clipping.engines.summing import sums_held
from quietgrad.clipping.engines.work import Engine
from quietgrad.clipping.norms.choice import Choice, Policy
from quietgrad.clipping.norms.cost import Throughput
from quietgrad.clipping.planner.tracing import ModelTrace, ParameterTrace

# Small kernels of one forward and backward pass per captured layer, and what capture adds, in units
# of the device's overhead of one call.
PLAIN_CALLS_PER_LAYER = 8.0
CAPTURE_CALLS_PER_LAYER = 4.0

# What one example's whole gradient costs beside autograd, in entries at the stated speed of
# elementwise work: its norm reads it, a sum reads it and is read and written, and so are two sums
# that are added. Six entries, but long rows of memory come three times as fast (measured: 1.5 to
# 1.9 of the stated ones on three processors).
STREAMED = 2.0

# Bytes below which memory is not traded for time.
NOT_WORTH_SAVING = 64 * 2**20

# Choices that are remembered of one model.
MOST_CHOICES = 4096


@dataclass(frozen=True)
class ExecutionChoice:
    """How a batch is run.

    Attributes:
        engine: "bookkeeping" or "one-example".
        physical_batch_size: examples per forward pass.
        seconds: modelled, for the whole batch.
        bytes: modelled peak over parameters and data.
        why: one sentence.
    """

    engine: Engine
    physical_batch_size: int
    seconds: float
    bytes: float
    why: str = ""


@dataclass
class Planned:
    """A traced model with what was chosen for it: batches of one size come again and again.

    Attributes:
        model: the trace.
    """

    model: ModelTrace
    _chosen: dict[tuple[int, float, tuple[Engine, ...]], ExecutionChoice] = field(
        default_factory=dict, repr=False
    )

    def choose(
        self,
        policies: Callable[[], Mapping[str, Policy]],
        examples: int,
        speed: Throughput,
        free: float,
        engines: tuple[Engine, ...],
        asked: float | None = None,
    ) -> ExecutionChoice:
        """As ``choose_execution``, for policies and a speed that are the same at every call."""
        key = (examples, budget_of(self.model, examples, free, asked), engines)
        if key not in self._chosen:
            if len(self._chosen) >= MOST_CHOICES:  # memory is scarce, and is another at every step
                self._chosen.clear()
            self._chosen[key] = choose_execution(
                self.model, policies(), examples, speed, free, engines, asked
            )
        return self._chosen[key]


def engines_for(asked: Engine, one_way: bool) -> tuple[Engine, ...]:
    """Which engines are weighed.

    ``one_way``: beside sketches, which are of captured factors, and in half precision: autograd
    adds up a record's positions in the model's own, so that two engines give it two gradients, and
    which of them runs follows from the batch's size.
    """
    if asked != "auto":
        return (asked,)
    return ("bookkeeping",) if one_way else ("bookkeeping", "one-example")


def budget_of(model: ModelTrace, examples: int, free: float, asked: float | None) -> float:
    """Bytes that a step may take: as many as were asked for, or what is free and no more than a
    step without privacy takes.
    """
    if asked is not None:
        return asked
    return min(free, max(nonprivate_bytes(model, examples), NOT_WORTH_SAVING))


def choose_execution(
    model: ModelTrace,
    policies: Mapping[str, Policy],
    examples: int,
    speed: Throughput,
    free: float,
    engines: tuple[Engine, ...],
    asked: float | None = None,
) -> ExecutionChoice:
    """The fastest execution choice that fits the budget; the smallest one where none fits.

    Args:
        free: bytes of memory that may be taken; ``asked``: the budget that a user gave.
    """
    kinds = kinds_of(model, policies)
    candidates = [
        predicted(engine, size, model, kinds, examples, speed)
        for engine in engines
        for size in _sizes(engine, examples)
    ]
    budget = budget_of(model, examples, free, asked)
    fitting = [c for c in candidates if c.bytes <= budget]
    if fitting:
        best = min(fitting, key=lambda c: (c.seconds, c.bytes))
        why = f"the fastest of {len(fitting)} choices within {budget / 2**20:,.0f} MiB"
    else:
        best = min(candidates, key=lambda c: (c.bytes, c.seconds))
        why = f"none fits {budget / 2**20:,.0f} MiB: the smallest of {len(candidates)}"
    return ExecutionChoice(best.engine, best.physical_batch_size, best.seconds, best.bytes, why)


def _sizes(engine: Engine, examples: int) -> list[int]:
    """Whole batch, and powers of two below it, evened out over micro-batches."""
    if engine == "one-example":
        return [1]
    parts = 1
    sizes: list[int] = []
    while True:
        size = -(-examples // parts)
        if not sizes or size != sizes[-1]:
            sizes.append(size)
        if size == 1:
            return sizes
        parts *= 2


class Kind(NamedTuple):
    """Parameters that are alike for the planner.

    Attributes:
        one: of them.
        policy: of all of them.
        times: how many they are.
    """

    one: ParameterTrace
    policy: Policy
    times: int


def kinds_of(model: ModelTrace, policies: Mapping[str, Policy]) -> list[Kind]:
    """A model's parameters by kind: layers repeat, and a choice is made at every step."""
    found: dict[object, Kind] = {}
    for p in model.parameters:
        policy = policies[p.name]
        key = (policy, p.cost, p.gradient_entries, p.output_gradient_bytes)
        known = found.get(key)
        found[key] = Kind(p, policy, 1) if known is None else known._replace(times=known.times + 1)
    return list(found.values())


def predicted(
    engine: Engine,
    size: int,
    model: ModelTrace,
    kinds: Sequence[Kind],
    examples: int,
    speed: Throughput,
) -> ExecutionChoice:
    """Modelled time and memory of one engine at one micro-batch size."""
    rounds = -(-examples // size)
    rows = size * model.rows
    work = (model.multiplications + model.weight_multiplications) * examples
    seconds = work / speed.multiplications_per_second * (1.0 + speed.rows_at_half_speed / rows)
    seconds += rounds * PLAIN_CALLS_PER_LAYER * model.calls * speed.call_overhead
    entries = model.sum_bytes / 4
    if engine == "one-example":
        seconds += examples * STREAMED * entries / speed.entries_per_second
        sums = model.sum_bytes * sums_held(examples) if examples > 1 else 0
        return ExecutionChoice(engine, 1, seconds, model.saved_bytes + model.gradient_bytes + sums)
    seconds += rounds * CAPTURE_CALLS_PER_LAYER * model.calls * speed.call_overhead
    extra, kept = 0.0, 0.0
    for kind in kinds:
        cost = kind.one.cost_for(size)
        choice = None if cost is None else kind.policy.choose(cost)
        extra += 0.0 if choice is None else kind.times * choice.seconds
        kept += kind.times * kept_bytes(kind.one, choice, size)
    seconds += rounds * extra
    # Output gradients grow while activations shrink; sums appear when both are there.
    sums = model.sum_bytes * sums_held(rounds)
    return ExecutionChoice(engine, size, seconds, size * model.saved_bytes + kept + sums)


def choices(model: ModelTrace, policies: Mapping[str, Policy], size: int) -> dict[str, Choice]:
    """Parameter name -> what its policy chooses for a micro-batch of ``size``, matrix-shaped
    parameters only.
    """
    found = {}
    for parameter in model.parameters:
        cost = parameter.cost_for(size)
        if cost is not None:
            found[parameter.name] = policies[parameter.name].choose(cost)
    return found


def kept_bytes(parameter: ParameterTrace, choice: Choice | None, size: int) -> float:
    """What book-keeping keeps of one parameter over autograd's own, for a micro-batch."""
    if choice is None or choice.kept:
        return 4.0 * size * parameter.gradient_entries
    return float(size * parameter.output_gradient_bytes)


def nonprivate_bytes(model: ModelTrace, examples: int) -> float:
    """Modelled peak of the plain step on the whole batch, over parameters and data."""
    return float(examples * model.saved_bytes + model.gradient_bytes)


def nonprivate_seconds(model: ModelTrace, examples: int, speed: Throughput) -> float:
    """Modelled time of the plain step on the whole batch."""
    work = (model.multiplications + model.weight_multiplications) * examples
    rows = examples * model.rows
    overhead = PLAIN_CALLS_PER_LAYER * model.calls * speed.call_overhead
    return overhead + work / speed.multiplications_per_second * (
        1.0 + speed.rows_at_half_speed / rows
    )


def free_bytes(device: torch.device) -> float:
    """Memory that is free now: the device's, or the machine's where the operating system tells;
    infinite where nothing does.
    """
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(
                1024.0 * float(line.split()[1]) for line in file if line.startswith("MemAvailable")
            )
    except (OSError, StopIteration):
        return float("inf")
