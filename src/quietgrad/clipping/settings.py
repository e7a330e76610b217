"""Clipping as it is asked for, in two records: what a guarantee depends on, and what is a matter of
speed and memory alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from quietgrad.clipping.capture.examples import Combined
from quietgrad.clipping.clipper import Clipper
from quietgrad.clipping.engines.thresholds import Scaling
from quietgrad.clipping.engines.work import Engine
from quietgrad.clipping.norms.choice import DEFAULT_SKETCH_DIM, Estimator
from quietgrad.records import Above0, Count, judge


@dataclass(frozen=True)
class Performance:
    """How the machine is used. Changes a record's contribution by rounding at most.

    Attributes:
        max_physical_batch_size: most examples per forward pass; None leaves it to the planner.
        memory_budget: bytes that a step may take over parameters and data (8e9 is 8 GB); None:
            what is free, and no more than a non-private step.
        engine: "bookkeeping" (one backward pass for all examples), "one-example" (a pass each;
            exact norms, so sketches that were asked for are then neither taken nor paid for), or
            "auto" for the planner's choice.
    """

    max_physical_batch_size: Count | None = None
    memory_budget: Above0 | None = None
    engine: Engine = "auto"

    def __post_init__(self) -> None:
        judge(self)


@dataclass(frozen=True)
class Clipping:
    """How per-example norms are taken, and what they are of.

    Attributes:
        estimator: of the norms: "exact" or "auto" (cheapest exact one per layer), "materialized",
            "ghost", "ghost64", "hutch" or "hutch++".
        sketch_dim: k of the sketches, for "hutch" and "hutch++".
        groups: "whole" (one norm over all parameters), "layer" (one per module), or parameter name
            pattern -> share of the clipping norm.
        scaling: "clip", factors min(1, C/n), or "automatic", C/(n + 0.01), with n the norm.
        layers: parameter name pattern -> estimator, for single layers; sketches may carry a k:
            "hutch:64".

    Raises:
        ValueError: naming the setting and the remedy.
    """

    estimator: Estimator = "auto"
    sketch_dim: int = DEFAULT_SKETCH_DIM
    groups: Literal["whole", "layer"] | Mapping[str, float] = "whole"
    scaling: Scaling = "clip"
    layers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        judge(self)
        self.clipper(1.0)  # it refuses what does not go together

    def clipper(
        self,
        max_grad_norm: float,
        performance: Performance | None = None,
        views: int = 1,
        combined: Combined | None = None,
    ) -> Clipper:
        """What clips to ``max_grad_norm``; ``views`` and ``combined`` as ``Clipper`` has them."""
        on = Performance() if performance is None else performance
        return Clipper(
            max_grad_norm,
            self.estimator,
            self.sketch_dim,
            max_physical_batch_size=on.max_physical_batch_size,
            engine=on.engine,
            groups=self.groups,
            scaling=self.scaling,
            layers=self.layers,
            views=views,
            combined=combined,
            memory_budget=on.memory_budget,
        )
