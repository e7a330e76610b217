"""The clipper: public settings of clipping, and the claim they make. ``bind`` gives it a model and
a loss (see ``bound``).

Source: docs/clipping.md; Bu et al. 2023 for book-keeping, DP-SGD-RC for sketched norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from torch import Tensor, nn

from quietgrad.beside.values import SideMethod
from quietgrad.checks import require_at_least, require_int, require_word
from quietgrad.clipping.bound import BoundClipper
from quietgrad.clipping.capture.backward import PerExampleLoss
from quietgrad.clipping.capture.examples import COMBINED, Combined
from quietgrad.clipping.capture.layout import Layout
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.clipping.cut.bound import CutClipper
from quietgrad.clipping.cut.refusals import is_cut, is_cut_and_sharded
from quietgrad.clipping.cut.sharded import CutShardedClipper
from quietgrad.clipping.engines.thresholds import SCALINGS, Groups, Scaling, require_groups
from quietgrad.clipping.engines.work import ENGINES, Engine
from quietgrad.clipping.layer_overrides import (
    LayerOverrides,
    claim_of,
    policies_of,
    require_layer_overrides,
)
from quietgrad.clipping.norms.choice import DEFAULT_SKETCH_DIM, ESTIMATORS, Estimator, Policy
from quietgrad.clipping.norms.cost import Throughput, modelled_throughput
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.planner.execution import ExecutionChoice
from quietgrad.clipping.sharded.bound import ShardedClipper
from quietgrad.clipping.sharded.refusals import is_fully_sharded
from quietgrad.clipping.soundness.refusals import require_loss, require_model
from quietgrad.events import RandomizedClipping, SensitivityClaim
from quietgrad.tensors import Batch


@dataclass(frozen=True)
class Clipper:
    """Turns a batch into a ``ClippedSum``; holds public settings only. Everything but C is the
    planner's unless asked for.

    Attributes:
        max_grad_norm: C.
        estimator: "exact" or "auto" (cheapest exact one per layer), "materialized", "ghost",
            "hutch" or "hutch++".
        sketch_dim: k of the sketches.
        physical_batch_size: examples per forward pass; None lets the planner choose,
        max_physical_batch_size: up to this many.
        engine: "bookkeeping", "one-example", or "auto" for the planner's choice, which is one
            example at a time, whatever the micro-batch size, where book-keeping cannot tell
            examples apart and norms are exact.
        groups: "whole" (one norm over all parameters), "layer" (one per module), or parameter name
            pattern -> share of C.
        scaling: "clip", factors min(1, C/n), or "automatic", C/(n + 0.01).
        layers: parameter name pattern -> estimator, for single layers; sketches may carry a k:
            "hutch:64". Beside a sketch every exact word means "materialized": a bound is divided by
            there, which may not follow from a batch's sizes.
        views: K rows of the model's batch that make up one record (augmentation multiplicity):
            every tensor of a batch has the shape [records, K, ...], and the gradient of the mean of
            a record's K losses is clipped.
        combined: None clips records; "mean" or "sum" clips users: batches are ``UserBatch``es, and
            the norm is that of the mean or the sum of the gradients of a user's records.
        memory_budget: bytes that a step may take over parameters and data; None: what is free, and
            no more than a non-private step.
        speed: of the device, for the planner; None: a stated model, so that equal configurations
            choose alike.
        beside: what is summed of losses and norms, to be released beside the gradients.
        claim: what one record can contribute.

    Raises:
        ValueError: naming the argument and the remedy.
    """

    max_grad_norm: float
    estimator: Estimator = "auto"
    sketch_dim: int = DEFAULT_SKETCH_DIM
    physical_batch_size: int | None = None
    max_physical_batch_size: int | None = None
    engine: Engine = "auto"
    groups: str | Groups | Mapping[str, float] = "whole"
    scaling: Scaling = "clip"
    layers: LayerOverrides | Mapping[str, str] = ()
    views: int = 1
    combined: Combined | None = None
    memory_budget: float | None = None
    speed: Throughput | None = None
    beside: tuple[SideMethod, ...] = ()
    claim: SensitivityClaim = field(init=False)

    def __post_init__(self) -> None:
        estimator = require_word("estimator", self.estimator, ESTIMATORS)
        engine = require_word("engine", self.engine, ENGINES)
        require_word("scaling", self.scaling, SCALINGS)
        object.__setattr__(self, "groups", require_groups(self.groups))
        overrides = require_layer_overrides(self.layers, self.sketch_dim)
        object.__setattr__(self, "layers", overrides)
        clipping = claim_of(estimator, self.sketch_dim, overrides, engine)
        object.__setattr__(self, "claim", SensitivityClaim(self.max_grad_norm, clipping))
        object.__setattr__(self, "max_grad_norm", self.claim.max_grad_norm)
        if self.sketched and self.groups != "whole":
            raise ValueError(
                f"groups={self.groups!r} with a sketched estimator cannot be accounted for: the "
                "envelope bounds one norm over all parameters; "
                "use groups='whole', or an exact estimator"
            )
        if self.memory_budget is not None and not self.memory_budget > 0:
            raise ValueError(
                f"memory_budget={self.memory_budget!r} must be above 0: it is a number of bytes"
            )
        require_int("views", self.views)
        require_at_least("views", self.views, 1, "1 is no augmentation")
        if self.combined is not None:
            require_word("combined", self.combined, COMBINED)
        for name in ("physical_batch_size", "max_physical_batch_size"):
            size = getattr(self, name)
            if size is not None:
                require_int(name, size)
                require_at_least(name, size, 1, "it is the number of examples in one forward pass")
        if engine == "one-example" and self.physical_batch_size not in (None, 1):
            raise ValueError(
                f"physical_batch_size={self.physical_batch_size} does not go with "
                "engine='one-example', which takes one example at a time; leave it out, or use "
                "engine='bookkeeping'"
            )

    def clipping_to(self, max_grad_norm: float) -> Clipper:
        """The same clipper with another C."""
        same = max_grad_norm == self.max_grad_norm
        return self if same else replace(self, max_grad_norm=max_grad_norm)

    @property
    def sketched(self) -> bool:
        """Whether any norm may be an estimate."""
        return isinstance(self.claim.clipping, RandomizedClipping)

    def bind(
        self, model: nn.Module, per_example_loss: PerExampleLoss, guard_batch: Batch | None = None
    ) -> BoundClipper:
        """This clipper for one model and one loss: what a training loop uses.

        Args:
            model: trained model; left as it was found, ``.grad`` fields included.
            per_example_loss: (model, batch) -> [examples], one loss per example.
            guard_batch: two or more public or made-up records that the guard examines, now and at
                later guarded steps; None examines the private batches themselves, the first one
                before it is clipped.

        Raises:
            ValueError: where the guard refuses model or loss on ``guard_batch``.
            TypeError: for what is no model, or no function.
        """
        require_model(model)
        require_loss(per_example_loss)
        kind: type[BoundClipper] = BoundClipper
        if is_cut(model):
            kind = CutClipper
        elif is_cut_and_sharded(model):
            kind = CutShardedClipper
        elif is_fully_sharded(model):
            kind = ShardedClipper
        bound = kind(self, model, per_example_loss)
        if guard_batch is not None:
            bound.check(guard_batch)
        return bound

    def clip(
        self,
        model: nn.Module,
        per_example_loss: PerExampleLoss,
        batch: Batch,
        projections: Projections | None = None,
    ) -> ClippedSum:
        """``bind`` for one batch: the guard runs at every call. See ``BoundClipper.clip``."""
        return self.bind(model, per_example_loss).clip(batch, projections)

    def norms(
        self,
        model: nn.Module,
        per_example_loss: PerExampleLoss,
        batch: Batch,
        projections: Projections | None = None,
    ) -> Tensor:
        """``bind`` for one batch. See ``BoundClipper.norms``."""
        return self.bind(model, per_example_loss).norms(batch, projections)

    def execution_choice(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch
    ) -> ExecutionChoice:
        """Engine and micro-batch size for a batch like this one."""
        return self.bind(model, per_example_loss).execution_choice(batch)

    def policies(self, layout: Layout) -> dict[str, Policy]:
        """Parameter name -> how its estimator is chosen."""
        speed = self.speed or modelled_throughput(next(iter(layout.parameters.values())).device)
        return policies_of(
            {name: tuple(p.shape) for name, p in layout.parameters.items()},
            self.estimator,
            self.sketch_dim,
            cast(LayerOverrides, self.layers),
            speed,
            True,
        )
