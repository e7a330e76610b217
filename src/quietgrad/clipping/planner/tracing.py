"""What one example's forward and backward pass looks like: sizes of per-example gradients, memory
that autograd keeps, multiplications.

Nothing of the example's values is kept, but its shape is: plan with a record of the longest shape,
which need not be a private one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from quietgrad.clipping.capture.backward import (
    Checkpointing,
    PerExampleLoss,
    forward_captured,
    gradients_of_batch,
    of_a_pass_that_trains,
    visit_captured_calls,
    with_any_checkpointing,
)
from quietgrad.clipping.capture.capture import Use
from quietgrad.clipping.capture.escapes import NotCaptured
from quietgrad.clipping.capture.layout import Layout
from quietgrad.clipping.capture.layout.modules import tensors_in
from quietgrad.clipping.capture.views import slice_batch
from quietgrad.clipping.engines.contributions import contributions_of
from quietgrad.clipping.norms.cost import Cost, cost_of
from quietgrad.clipping.norms.estimators.materialized import Materialized
from quietgrad.clipping.norms.factors import DirectGradients, MatrixFactors, SummedRows
from quietgrad.tensors import Batch, tensors_of


@dataclass(frozen=True)
class ParameterTrace:
    """One parameter.

    Attributes:
        name: its name.
        cost: sizes for one example; None where per-example gradients are small or formed by the
            fallback.
        shape: of the parameter.
        output_gradient_bytes: memory of the gradients at its layer's outputs, per example.
    """

    name: str
    cost: Cost | None
    shape: tuple[int, ...]
    output_gradient_bytes: int

    @property
    def gradient_entries(self) -> int:
        return math.prod(self.shape)

    def cost_for(self, examples: int) -> Cost | None:
        """Sizes for a micro-batch."""
        return None if self.cost is None else self.cost._replace(examples=examples)


@dataclass(frozen=True)
class ModelTrace:
    """One example through a model.

    Attributes:
        parameters: trainable ones that the loss depends on.
        saved_bytes: what autograd keeps for the backward pass, per example, parameters left out.
        multiplications: of forward and backward pass without weight gradients, per example.
        weight_multiplications: of the weight gradients, per example.
        calls: captured calls, each of which costs some overhead.
        gradient_bytes, sum_bytes: one gradient of all trainable parameters in their own type, and
            in the type of the sums.
        captured: False where plain autograd was traced, weight gradients included in
            ``multiplications``.
    """

    parameters: tuple[ParameterTrace, ...]
    saved_bytes: int
    multiplications: float
    weight_multiplications: float
    calls: int
    gradient_bytes: int
    sum_bytes: int
    captured: bool = True

    @property
    def rows(self) -> float:
        """Positions of one example in the layers where the work is."""
        work = [
            (c.positions, c.positions * c.rows * c.columns)
            for p in self.parameters
            if (c := p.cost) is not None
        ]
        total = sum(w for _, w in work)
        return sum(t * w for t, w in work) / total if total else 1.0


class _Everywhere:
    """In place of the counter's hooks on modules, which stop where a module is called with a
    parameter.
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self) -> None: ...


ASSUMED_BYTES = 1 << 30  # that autograd keeps of an example, where nothing tells how many

Looks = Literal["counts and saved", "saved", "none"]
LOOKS: tuple[Looks, ...] = ("counts and saved", "saved", "none")


@dataclass
class _Meter:
    """Multiplications and saved memory of what runs inside.

    ``looks``: all; without torch's counter of multiplications, which cannot be on everywhere (it
    knows nothing of nested tensors, say); none, since torch.func in a loss bears no look at what is
    saved.
    """

    looks: Looks
    multiplications: float = 0.0
    saved: dict[int, int] = field(default_factory=dict)

    @property
    def saved_bytes(self) -> int:
        return ASSUMED_BYTES if self.looks == "none" else sum(self.saved.values())

    @contextlib.contextmanager
    def reading(self, model: nn.Module, one: Batch) -> Iterator[None]:
        # Parameters and data are there anyway; an example is a slice of the whole batch's memory.
        there = {t.untyped_storage()._cdata for t in (*tensors_in(model), *tensors_of(one))}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in there:
                self.saved[storage._cdata] = storage.nbytes()
            return tensor

        if self.looks == "none":
            yield
            return
        if self.looks == "saved":
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                yield
            return
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = _Everywhere()  # type: ignore[assignment]
        with counter, saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.multiplications += counter.get_total_flops() / 2


def trace(
    model: nn.Module,
    layout: Layout,
    per_example_loss: PerExampleLoss,
    batch: Batch,
    checkpointing: Checkpointing,
    captured: bool = True,
) -> ModelTrace:
    """Traces the first example of ``batch``; cost: its forward and backward pass. The random state
    is left as it was.

    Args:
        model, layout, per_example_loss: what is traced.
        batch: at least one example.
        checkpointing: what is known of the model's.
        captured: False for models that cannot be captured.
    """
    devices = sorted(
        {p.device.index or 0 for p in layout.parameters.values() if p.device.type == "cuda"}
    )
    one, trace_it = slice_batch(batch, 0, 1), _trace if captured else _trace_plain
    per_example_loss = of_a_pass_that_trains(per_example_loss)

    def traced(looks: Looks) -> ModelTrace:
        with torch.random.fork_rng(devices):
            return with_any_checkpointing(
                checkpointing, lambda r: trace_it(model, layout, per_example_loss, one, r, looks)
            )

    for looks in LOOKS[:-1]:
        try:
            return traced(looks)
        except (torch.OutOfMemoryError, NotCaptured):
            raise
        except (RuntimeError, TypeError, NotImplementedError):  # the look's, or the model's, again
            continue
    return traced(LOOKS[-1])


def _trace_plain(
    model: nn.Module,
    layout: Layout,
    per_example_loss: PerExampleLoss,
    one: Batch,
    reentrant: bool,
    looks: Looks,
) -> ModelTrace:
    meter = _Meter(looks)
    with meter.reading(model, one):
        gradients_of_batch(model, layout, per_example_loss, one, reentrant)
    parameters = tuple(
        ParameterTrace(name, None, tuple(p.shape), 0) for name, p in layout.parameters.items()
    )
    work, saved = meter.multiplications, meter.saved_bytes
    return ModelTrace(
        parameters, saved, work, 0.0, len(layout.sites), *_bytes_of(layout), captured=False
    )


def _bytes_of(layout: Layout) -> tuple[int, int]:
    values = list(layout.parameters.values())
    return sum(p.numel() * p.element_size() for p in values), sum(
        p.numel() * max(p.element_size(), 4) for p in values
    )


def _trace(
    model: nn.Module,
    layout: Layout,
    per_example_loss: PerExampleLoss,
    one: Batch,
    reentrant: bool,
    looks: Looks,
) -> ModelTrace:
    found: dict[str, list[MatrixFactors]] = {}
    output_bytes: dict[str, int] = {}

    def receive(use: Use) -> None:
        size = sum(g.numel() * g.element_size() for g in use.output_gradients.values())
        if use.site.rule is None:
            for name in use.site.parameters.values():
                output_bytes[name] = 0
            return
        for name, contribution in contributions_of(use, 1, None).items():
            if isinstance(contribution, DirectGradients | SummedRows):
                output_bytes.setdefault(name, 0)
            else:
                found.setdefault(name, []).append(contribution)
                output_bytes[name] = output_bytes.get(name, 0) + size

    meter = _Meter(looks)
    passes = forward_captured(model, layout, per_example_loss, one, receive, reentrant)
    with meter.reading(model, one), passes as (losses, recording):
        visit_captured_calls(losses, recording, layout)
        calls = sum(recording.calls.values())
    traces = []
    for name, size in output_bytes.items():
        uses = found.get(name)
        traces.append(
            ParameterTrace(
                name, cost_of(uses) if uses else None, tuple(layout.parameters[name].shape), size
            )
        )
    weight = sum(Materialized().multiplications(c, 1) for p in traces if (c := p.cost) is not None)
    work, saved = meter.multiplications, meter.saved_bytes
    return ModelTrace(tuple(traces), saved, work, weight, calls, *_bytes_of(layout))
