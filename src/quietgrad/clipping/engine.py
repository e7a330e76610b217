"""The clipper: settings in, clipped sums out, micro-batch by micro-batch.

Source: docs/clipping.md; Bu et al. 2023 for book-keeping, DP-SGD-RC for sketched norms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from quietgrad.checks import require_at_least, require_int, require_word
from quietgrad.clipping.arrangement import Arrangement, arrange, free_bytes
from quietgrad.clipping.backward import PerExampleLoss
from quietgrad.clipping.checking import check_capture_once
from quietgrad.clipping.clipped_sum import ClippedSum, PrivateCounts
from quietgrad.clipping.engines import (
    ENGINES,
    Engine,
    Work,
    add_by_bookkeeping,
    add_by_two_passes,
    add_one_by_one,
    gradients_of_one,
    group_norms,
    norms_of_one,
)
from quietgrad.clipping.layout import Layout, layout_of
from quietgrad.clipping.pins import Pins, claim_of, policies_of, require_pins
from quietgrad.clipping.planner import DEFAULT_SKETCH_DIM, ESTIMATORS, Estimator, Policy
from quietgrad.clipping.refusals import refuse_cross_example_layers
from quietgrad.clipping.tally import Sums
from quietgrad.clipping.thresholds import SCALINGS, Groups, Scaling, require_groups, thresholds
from quietgrad.clipping.throughput import Throughput, modelled_throughput
from quietgrad.clipping.tracing import ModelTrace, trace
from quietgrad.facts import RandomizedClipping, SensitivityClaim
from quietgrad.tensors import Batch, accumulation_dtype, batch_size_of, slice_batch, tensors_of

# Of what is free, the share that a step may take when no budget is given.
SHARE_OF_FREE_MEMORY = 0.8

# Model -> (trainable parameters, size class of an example) -> its trace.
_traces: WeakKeyDictionary[nn.Module, dict[tuple[frozenset[str], int], ModelTrace]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Clipper:
    """Turns a batch into a ``ClippedSum``; holds public settings only. Everything but C is the planner's unless pinned.

    Attributes:
        max_grad_norm: C.
        estimator: "exact" or "auto" (cheapest exact one per layer), "materialized", "ghost", "hutch" or "hutch++".
        sketch_dim: k of the sketches.
        micro_batch_size: examples per forward pass; None lets the planner choose,
        max_micro_batch_size: up to this many.
        engine: "bookkeeping", "two-pass", "one-example", or "auto" for the planner's choice.
        groups: "whole" (one norm over all parameters), "layer" (one per module), or parameter name pattern -> share of C.
        scaling: "clip", factors min(1, C/n), or "automatic", C/(n + 0.01).
        layers: parameter name pattern -> estimator, for single layers; sketches may carry a k: "hutch:64".
        memory_budget: bytes that a step may take over parameters and data; None: what is free, and no more than a non-private step.
        speed: of the device, for the planner; None: a stated model, so that equal configurations choose alike.
        claim: what one record can contribute.

    Raises:
        ValueError: naming the argument and the remedy.
    """

    max_grad_norm: float
    estimator: Estimator = "auto"
    sketch_dim: int = DEFAULT_SKETCH_DIM
    micro_batch_size: int | None = None
    max_micro_batch_size: int | None = None
    engine: Engine = "auto"
    groups: str | Groups | Mapping[str, float] = "whole"
    scaling: Scaling = "clip"
    layers: Pins | Mapping[str, str] = ()
    memory_budget: float | None = None
    speed: Throughput | None = None
    claim: SensitivityClaim = field(init=False)

    def __post_init__(self) -> None:
        estimator = require_word("estimator", self.estimator, ESTIMATORS)
        engine = require_word("engine", self.engine, ENGINES)
        require_word("scaling", self.scaling, SCALINGS)
        object.__setattr__(self, "groups", require_groups(self.groups))
        pins = require_pins(self.layers, self.sketch_dim)
        object.__setattr__(self, "layers", pins)
        clipping = claim_of(estimator, self.sketch_dim, pins, engine)
        object.__setattr__(self, "claim", SensitivityClaim(self.max_grad_norm, clipping))
        if isinstance(clipping, RandomizedClipping) and self.groups != "whole":
            raise ValueError(
                f"groups={self.groups!r} with a sketched estimator cannot be accounted for: the envelope bounds one norm over all parameters; "
                "use groups='whole', or an exact estimator"
            )
        if self.memory_budget is not None and not self.memory_budget > 0:
            raise ValueError(f"memory_budget={self.memory_budget!r} must be above 0: it is a number of bytes")
        for name in ("micro_batch_size", "max_micro_batch_size"):
            size = getattr(self, name)
            if size is not None:
                require_int(name, size)
                require_at_least(name, size, 1, "it is the number of examples in one forward pass")
        if engine == "one-example" and self.micro_batch_size not in (None, 1):
            raise ValueError(
                f"micro_batch_size={self.micro_batch_size} does not go with engine='one-example', which takes one example at a time; leave it "
                "out, or use engine='bookkeeping'"
            )

    def clip(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch, generator: torch.Generator | None = None
    ) -> ClippedSum:
        """Sum of clipped per-example gradients of a batch, micro-batch by micro-batch.

        Args:
            model: trained model; left as it was found, ``.grad`` fields included.
            per_example_loss: (model, batch) -> [examples], one loss per example.
            batch: nested containers of tensors with the example as first dimension; may be empty.
            generator: source of the random projections of sketches; None draws from torch's default generator.

        Returns:
            The clipped sum. Private until noise is added.

        Raises:
            ValueError: for cross-example layers, losses that are not one per example, parameters that cannot be captured.
        """
        layout, how = self._prepare(model, per_example_loss, batch)
        work = self._work(model, per_example_loss, layout, generator)
        add = {"bookkeeping": add_by_bookkeeping, "two-pass": add_by_two_passes, "one-example": add_one_by_one}[
            how.engine
        ]
        sums: Sums = {}
        counts = PrivateCounts()
        for part in _micro_batches(batch, how.micro_batch_size):
            finite = add(work, part, sums)
            counts += PrivateCounts(len(finite), (~finite).sum())
        gradients = {name: sums.pop(name) if name in sums else _zeros_like(p) for name, p in layout.parameters.items()}
        return ClippedSum(gradients, self.claim, counts)

    def norms(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch, generator: torch.Generator | None = None
    ) -> Tensor:
        """[examples] norms (not squared) of the whole per-example gradients. Private."""
        layout, how = self._prepare(model, per_example_loss, batch)
        work = self._work(model, per_example_loss, layout, generator)
        parts = []
        for part in _micro_batches(batch, how.micro_batch_size):
            with torch.no_grad():
                one = how.engine == "one-example"
                norms = norms_of_one(work, gradients_of_one(work, part)) if one else group_norms(work, part)
                parts.append(norms if len(norms) == 1 else norms.square().sum(dim=0, keepdim=True).sqrt())
        return torch.cat(parts, dim=1)[0] if parts else next(iter(layout.parameters.values())).new_zeros(0)

    def arrangement(self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch) -> Arrangement:
        """Engine and micro-batch size for a batch like this one."""
        return self._prepare(model, per_example_loss, batch)[1]

    def zero(self, layout: Layout) -> ClippedSum:
        """The sum of an empty batch."""
        return ClippedSum({name: _zeros_like(p) for name, p in layout.parameters.items()}, self.claim)

    def _prepare(self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch) -> tuple[Layout, Arrangement]:
        refuse_cross_example_layers(model)
        layout = layout_of(model)
        thresholds(list(layout.parameters), self.max_grad_norm, cast("str | Groups", self.groups))
        how = self._arrange(model, layout, per_example_loss, batch)
        if batch_size_of(batch) and how.engine != "one-example":
            check_capture_once(model, layout, per_example_loss, batch)
        return layout, how

    def _arrange(self, model: nn.Module, layout: Layout, per_example_loss: PerExampleLoss, batch: Batch) -> Arrangement:
        n = min(batch_size_of(batch), self.max_micro_batch_size or batch_size_of(batch))
        sketched = isinstance(self.claim.clipping, RandomizedClipping)
        engine = self.engine
        if engine == "auto" and self.micro_batch_size is not None:
            engine = "one-example" if self.micro_batch_size == 1 and not sketched else "bookkeeping"
        if engine == "one-example" or self.micro_batch_size is not None or n < 2:
            size = 1 if engine == "one-example" else self.micro_batch_size or max(n, 1)
            return Arrangement("bookkeeping" if engine == "auto" else engine, size, math.nan, math.nan, "pinned")
        device = next(iter(layout.parameters.values())).device
        speed = self.speed or modelled_throughput(device)
        budget = self.memory_budget or SHARE_OF_FREE_MEMORY * free_bytes(device)
        engines: tuple[Engine, ...] = (engine,)
        if engine == "auto":
            several = self.groups != "whole"
            engines = ("bookkeeping",) if several else ("bookkeeping", "two-pass")
            engines += () if sketched else ("one-example",)
        policies = self.policies(layout)
        return arrange(traced(model, layout, per_example_loss, batch), policies, n, speed, budget, engines)

    def policies(self, layout: Layout) -> dict[str, Policy]:
        """Parameter name -> how its estimator is chosen."""
        speed = self.speed or modelled_throughput(next(iter(layout.parameters.values())).device)
        return policies_of(layout.parameters, self.estimator, self.sketch_dim, cast(Pins, self.layers), speed, True)

    def _work(
        self, model: nn.Module, per_example_loss: PerExampleLoss, layout: Layout, generator: torch.Generator | None
    ) -> Work:
        limits = thresholds(list(layout.parameters), self.max_grad_norm, cast("str | Groups", self.groups))
        return Work(model, per_example_loss, layout, self.policies(layout), limits, self.scaling, generator)


def traced(model: nn.Module, layout: Layout, per_example_loss: PerExampleLoss, batch: Batch) -> ModelTrace:
    """The trace of the first example, or of an earlier one of up to twice its size: shapes change from batch to batch, choices need not."""
    entries = sum(t[:1].numel() for t in tensors_of(batch))
    known = _traces.setdefault(model, {})
    key = (frozenset(layout.parameters), max(entries, 1).bit_length())
    if key not in known:
        known[key] = trace(model, layout, per_example_loss, batch)
    return known[key]


def _micro_batches(batch: Batch, size: int) -> list[Batch]:
    return [slice_batch(batch, start, start + size) for start in range(0, batch_size_of(batch), size)]


def _zeros_like(p: Tensor) -> Tensor:
    return torch.zeros_like(
        p, dtype=accumulation_dtype(p.dtype), memory_format=torch.contiguous_format, requires_grad=False
    )
