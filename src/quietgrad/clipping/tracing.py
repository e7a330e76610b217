"""What one example's forward and backward pass looks like: sizes of per-example gradients, memory that autograd keeps, multiplications.

Nothing of the example's values is kept, but its shape is: plan with a record of the longest shape, which need not be a private one.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from quietgrad.clipping.backward import PerExampleLoss, forward_captured, visit_captured_calls, with_any_checkpointing
from quietgrad.clipping.capture import Use
from quietgrad.clipping.factors import DirectGradients, MatrixFactors
from quietgrad.clipping.layout import Layout
from quietgrad.clipping.planner import Cost, cost_of
from quietgrad.clipping.tally import contributions_of
from quietgrad.tensors import Batch, slice_batch


@dataclass(frozen=True)
class ParameterTrace:
    """One parameter.

    Attributes:
        name: its name.
        cost: sizes for one example; None where per-example gradients are small or formed by the fallback.
        gradient_entries: entries of the parameter.
        output_gradient_bytes: memory of the gradients at its layer's outputs, per example.
    """

    name: str
    cost: Cost | None
    gradient_entries: int
    output_gradient_bytes: int

    def cost_for(self, examples: int) -> Cost | None:
        """Sizes for a micro-batch."""
        return None if self.cost is None else replace(self.cost, examples=examples)


@dataclass(frozen=True)
class ModelTrace:
    """One example through a model.

    Attributes:
        parameters: trainable ones that the loss depends on.
        saved_bytes: what autograd keeps for the backward pass, per example, parameters left out.
        multiplications: of forward and backward pass without weight gradients, per example.
        weight_multiplications: of the weight gradients, per example.
        calls: captured calls, each of which costs some overhead.
        gradient_bytes, sum_bytes: one gradient of all trainable parameters in their own type, and in the type of the sums.
    """

    parameters: tuple[ParameterTrace, ...]
    saved_bytes: int
    multiplications: float
    weight_multiplications: float
    calls: int
    gradient_bytes: int
    sum_bytes: int

    @property
    def rows(self) -> float:
        """Positions of one example in the layers where the work is."""
        work = [(c.positions, c.positions * c.rows * c.columns) for p in self.parameters if (c := p.cost) is not None]
        total = sum(w for _, w in work)
        return sum(t * w for t, w in work) / total if total else 1.0


def trace(model: nn.Module, layout: Layout, per_example_loss: PerExampleLoss, batch: Batch) -> ModelTrace:
    """Traces the first example of ``batch``; cost: its forward and backward pass. The random state is left as it was."""
    devices = sorted({p.device.index or 0 for p in layout.parameters.values() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        return with_any_checkpointing(
            model, lambda r: _trace(model, layout, per_example_loss, slice_batch(batch, 0, 1), r)
        )


@contextlib.contextmanager
def _quiet_about_hooks() -> Iterator[None]:
    """The counter's own global hooks fire once more for a compiled module, which is all that torch warns of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*when there are global hooks on modules", category=UserWarning)
        yield


def _trace(
    model: nn.Module, layout: Layout, per_example_loss: PerExampleLoss, one: Batch, reentrant: bool
) -> ModelTrace:
    parameters_at = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters_at:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    found: dict[str, list[MatrixFactors]] = {}
    output_bytes: dict[str, int] = {}

    def receive(use: Use) -> None:
        size = sum(g.numel() * g.element_size() for g in use.output_gradients.values())
        if use.site.rule is None:
            for name in use.site.parameters.values():
                output_bytes[name] = 0
            return
        for name, contribution in contributions_of(use, 1, None).items():
            if isinstance(contribution, DirectGradients):
                output_bytes.setdefault(name, 0)
            else:
                found.setdefault(name, []).append(contribution)
                output_bytes[name] = output_bytes.get(name, 0) + size

    counter = FlopCounterMode(display=False)
    passes = forward_captured(model, layout, per_example_loss, one, receive, reentrant)
    with _quiet_about_hooks(), counter, saved_tensors_hooks(pack, lambda tensor: tensor), passes as (losses, recording):
        visit_captured_calls(losses, recording, layout)
        calls = sum(recording.calls.values())
    traces = []
    for name, size in output_bytes.items():
        uses = found.get(name)
        traces.append(ParameterTrace(name, cost_of(uses) if uses else None, layout.parameters[name].numel(), size))
    weight = sum(c.multiplications("materialized", 1) for p in traces if (c := p.cost) is not None)
    values = list(layout.parameters.values())
    return ModelTrace(
        tuple(traces),
        sum(saved.values()),
        counter.get_total_flops() / 2,
        weight,
        calls,
        sum(p.numel() * p.element_size() for p in values),
        sum(p.numel() * max(p.element_size(), 4) for p in values),
    )
