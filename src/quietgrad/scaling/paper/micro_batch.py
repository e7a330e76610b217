"""A micro-batch on paper: the code that clips runs on tensors that are shapes alone (torch's
FakeTensorMode), and what they would hold is counted (``held``). Nothing is computed, no weight is
made; a block of 70 billion parameters' worth takes a tenth of a second.

What needs numbers is left out: the guard, and examples that are taken alone since their norm's
rounding is in doubt. Both hold less than a micro-batch does.

A model of many equal blocks is run with two and with three; all that is counted grows by the same
amount for every further one (between the first and the last block's turn the bytes alive run in a
straight line). Tests hold this against the whole model, and the whole model against a real step.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from quietgrad.clipping.capture.backward import (
    PerExampleLoss,
    forward_captured,
    visit_captured_calls,
)
from quietgrad.clipping.capture.capture import Use
from quietgrad.clipping.capture.examples import Examples
from quietgrad.clipping.capture.layout import layout_of
from quietgrad.clipping.capture.layout.modules import tensors_in
from quietgrad.clipping.clipper import Clipper
from quietgrad.clipping.engines.one_example import add_scaled, gradients_of_one, norms_of_one
from quietgrad.clipping.engines.thresholds import clip_factors, thresholds
from quietgrad.clipping.engines.work import Engine, Work
from quietgrad.clipping.norms.coarseness import least_times, standing
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.planner.tracing import ModelTrace
from quietgrad.scaling.paper.held import Held
from quietgrad.scaling.paper.once import Known, measured_once
from quietgrad.tensors import Batch, tensors_of

BLOCK = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class PaperParameter:
    """One parameter.

    Attributes:
        name, entries, item: its name, size and bytes an entry.
        trained: whether it is.
        block: the number of its block; -1 outside of all.
        shape: as it is.
        drawn: entries whose noise is drawn for each that is kept: of a weight that is cut by its
            columns whole rows are.
    """

    name: str
    entries: int
    item: int
    trained: bool
    block: int
    shape: tuple[int, ...]
    drawn: int = 1


@dataclass(frozen=True)
class Paper:
    """What was counted.

    Attributes:
        parameters: of the whole model.
        buffer_bytes: of its buffers.
        peaks: label -> the most bytes over parameters, buffers and earlier sums: "forward",
            "backward ...", "sums ..." by block.
        trace: the planner's, of one example.
        examples: of the micro-batch.
        sent_per_position: bytes that a device sends of a position's activations and their
            gradients, where several share a record.
        copied: trained entries that each of those holds whole (norms).
    """

    parameters: tuple[PaperParameter, ...]
    buffer_bytes: int
    peaks: dict[str, int]
    trace: ModelTrace
    examples: int
    sent_per_position: float = 0.0
    copied: int = 0

    @property
    def trained_entries(self) -> int:
        """Entries that are trained."""
        return sum(p.entries for p in self.parameters if p.trained)

    @property
    def drawn_entries(self) -> int:
        """Entries whose noise is drawn, of all of them."""
        return sum(p.entries * p.drawn for p in self.parameters if p.trained)

    @property
    def parameter_bytes(self) -> int:
        """Of all parameters."""
        return sum(p.entries * p.item for p in self.parameters)

    @property
    def outside_bytes(self) -> int:
        """Of parameters outside of all blocks."""
        return sum(p.entries * p.item for p in self.parameters if p.block < 0)

    @property
    def largest_block_bytes(self) -> int:
        """Of the parameters of the largest block; 0 without blocks."""
        sizes: dict[int, int] = {}
        for p in self.parameters:
            sizes[p.block] = sizes.get(p.block, 0) + p.entries * p.item
        return max((size for block, size in sizes.items() if block >= 0), default=0)

    def at(self, examples: int, other: Paper) -> Paper:
        """So many examples, by the line through this count and another one."""
        if examples in (self.examples, other.examples):
            return self if examples == self.examples else other
        part = (examples - self.examples) / (other.examples - self.examples)
        peaks = {
            label: max(0, round(value + part * (other.peaks[label] - value)))
            for label, value in self.peaks.items()
        }
        return replace(self, peaks=peaks, examples=examples)

    def peak(self, *kinds: str) -> int:
        """The most of the labels that begin so; of all without any."""
        found = [v for k, v in self.peaks.items() if not kinds or k.startswith(kinds)]
        return max(found, default=0)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Code that asks fake tensors where they lie gets a warning of torch's, and an answer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        warnings.filterwarnings("ignore", category=FutureWarning, message="`is_gradient_checkp")
        yield


def on_paper(
    model: nn.Module,
    per_example_loss: PerExampleLoss,
    batch: Batch,
    clipper: Clipper,
    engine: Engine,
    mode: FakeTensorMode,
    known: Known,
) -> dict[str, int]:
    """Label -> the most bytes that clipping a micro-batch holds, over model and batch.

    Args:
        model, per_example_loss, batch: fake tensors of ``mode``, or real ones, left as they are.
        clipper: settings of the norms.
        engine: "bookkeeping" or "one-example" (the batch then has one).
        mode: of the fake tensors.
        known: what norms of some sizes hold; grows.
    """
    with quiet():
        layout = layout_of(model)
        own = tensors_of(batch)
        there = [*model.parameters(), *model.buffers(), *own]
        # Real ones are seen as their fakes.
        fakes = [t if isinstance(t, FakeTensor) else mode.from_tensor(t) for t in there]
        held = Held([*there, *fakes])
        limits = thresholds(list(layout.parameters), 1.0, "whole")
        policies = clipper.policies(layout)
        projections = Projections.fresh()
        work = Work(
            model, per_example_loss, layout, policies, limits, "clip", projections, clipper.sketched
        )
        work = replace(work, least_times=least_times(standing(tensors_in(model))))
        with measured_once(held, known), mode, held:
            sums = _Sums(held)
            held.mark("forward")
            examples = Examples.each(batch, 1)
            if engine == "one-example":
                _one_example(work, examples, sums, held)
            else:
                _bookkeeping(work, examples, sums, held)
        return dict(held.peaks)


class _Sums(dict[str, Tensor]):
    """Sums that say whose turn it is."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self._held = held

    def get(self, name: str, default: Any = None) -> Any:
        self._held.mark(f"sums {block_of(name)}")
        return super().get(name, default)


def block_of(name: str) -> int:
    found = BLOCK.search(name)
    return int(found.group(1)) if found else -1


def _bookkeeping(work: Work, batch: Examples, sums: _Sums, held: Held) -> None:
    """``add_by_bookkeeping`` without the look at what is in doubt, which needs numbers."""
    accumulator = work.accumulator(batch.groups, True)

    def receive(use: Use) -> None:
        held.mark(f"backward {block_of(use.site.name + '.')}")
        accumulator.receive(use)

    passes = forward_captured(
        work.model, work.layout, work.per_example_loss, batch.rows, receive, False
    )
    with passes as (losses, recording):
        losses_of_examples = batch.averaged(losses)
        accumulator.recording, accumulator.losses = recording, losses.detach()
        visit_captured_calls(losses_of_examples, recording, work.layout)
    del passes, losses, losses_of_examples
    with torch.no_grad():
        norms = accumulator.finish()
        divisors = norms.divisors() if work.sketched else norms.enlarged
        factors = clip_factors(divisors, work.limits, work.scaling)
        accumulator.add_weighted(sums, factors, None)


def _one_example(work: Work, batch: Examples, sums: _Sums, held: Held) -> None:
    """``add_one_by_one`` without the look at whether the norm is finite."""
    gradients = gradients_of_one(work, batch)
    with torch.no_grad():
        norms_of_one(work, gradients, batch.divisor)
        for name in list(gradients):
            held.mark(f"sums {block_of(name)}")
            add_scaled(sums, {name: gradients.pop(name)}, 1.0, True)


def parameters_of(
    model: nn.Module, drawn: Mapping[str, int] = MappingProxyType({})
) -> tuple[PaperParameter, ...]:
    """What a plan needs to know of them; ``drawn``: by name, where it is not one."""
    return tuple(
        PaperParameter(
            n,
            p.numel(),
            p.element_size(),
            p.requires_grad,
            block_of(n),
            tuple(p.shape),
            drawn.get(n, 1),
        )
        for n, p in model.named_parameters()
    )
