"""Book-keeping engine: one forward pass, one backward pass that skips weight gradients, then one weighted product per layer.

Cost over a non-private step: the norm estimates. Memory over it: gradients at layer outputs are kept until the weighted products are done.
Source: docs/methods, section 1 ("book-keeping"; Bu et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quietgrad.checks import require_at_least, require_int
from quietgrad.clipping.clipped_sum import ClippedSum, PrivateCounts
from quietgrad.clipping.estimators import ghost_norms, hutch_norms, hutch_plus_plus_norms, materialized_norms
from quietgrad.clipping.factoring import Factored, PerExampleLoss, check_capture_once, factor
from quietgrad.clipping.factors import (
    Contribution,
    DirectGradients,
    MatrixFactors,
    OneHotFactors,
    keep_examples,
    positions,
    rows_and_columns,
    weighted_sum,
)
from quietgrad.clipping.layout import Layout, layout_of
from quietgrad.clipping.planner import (
    DEFAULT_SKETCH_DIM,
    SKETCHES,
    Choice,
    Estimator,
    choose_estimator,
    require_estimator,
)
from quietgrad.clipping.refusals import refuse_cross_example_layers
from quietgrad.facts import ExactClipping, RandomizedClipping, SensitivityClaim
from quietgrad.tensors import Batch, accumulation_dtype, batch_size_of, slice_batch


@dataclass(frozen=True)
class Clipper:
    """Turns a batch into a ``ClippedSum``; holds public settings only.

    Attributes:
        max_grad_norm: C.
        estimator: "exact" or "auto" (cheapest exact one per layer), "materialized", "ghost", "hutch" or "hutch++".
        sketch_dim: k of the sketches.
        micro_batch_size: examples per forward pass; None takes the batch whole.
    """

    max_grad_norm: float
    estimator: Estimator = "auto"
    sketch_dim: int = DEFAULT_SKETCH_DIM
    micro_batch_size: int | None = None
    claim: SensitivityClaim = field(init=False)

    def __post_init__(self) -> None:
        estimator = require_estimator(self.estimator)
        clipping = RandomizedClipping(self.sketch_dim) if estimator in SKETCHES else ExactClipping()
        object.__setattr__(self, "claim", SensitivityClaim(self.max_grad_norm, clipping))
        if self.micro_batch_size is not None:
            require_int("micro_batch_size", self.micro_batch_size)
            require_at_least(
                "micro_batch_size", self.micro_batch_size, 1, "it is the number of examples in one forward pass"
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
        refuse_cross_example_layers(model)
        layout = layout_of(model)
        total = self.zero(layout)
        n = batch_size_of(batch)
        if n:
            check_capture_once(model, layout, per_example_loss, batch)
        step = self.micro_batch_size or max(n, 1)
        for start in range(0, n, step):
            part = slice_batch(batch, start, start + step)
            factored = factor(model, layout, per_example_loss, part)
            norms = estimate_norms(factored, self.estimator, self.sketch_dim, generator)
            add_clipped(total.gradients, factored, norms, self.max_grad_norm)
            counts = PrivateCounts(min(step, n - start), (~norms.isfinite()).sum())
            total = ClippedSum(total.gradients, total.claim, total.private + counts)
        return total

    def norms(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch, generator: torch.Generator | None = None
    ) -> Tensor:
        """[examples] norms (not squared) of the whole per-example gradients. Private."""
        refuse_cross_example_layers(model)
        layout = layout_of(model)
        n = batch_size_of(batch)
        if n:
            check_capture_once(model, layout, per_example_loss, batch)
        step = self.micro_batch_size or max(n, 1)
        parts = []
        for start in range(0, n, step):
            factored = factor(model, layout, per_example_loss, slice_batch(batch, start, start + step))
            parts.append(estimate_norms(factored, self.estimator, self.sketch_dim, generator))
        return torch.cat(parts) if parts else next(iter(layout.parameters.values())).new_zeros(0)

    def zero(self, layout: Layout) -> ClippedSum:
        """The sum of an empty batch."""
        gradients = {
            name: torch.zeros_like(
                p, dtype=accumulation_dtype(p.dtype), memory_format=torch.contiguous_format, requires_grad=False
            )
            for name, p in layout.parameters.items()
        }
        return ClippedSum(gradients, self.claim)


def estimate_norms(
    factored: Factored, estimator: Estimator, sketch_dim: int, generator: torch.Generator | None
) -> Tensor:
    """[examples] norms of the whole per-example gradients: all parameters together. Private."""
    dtype = _widest(factored)
    squared = torch.zeros(factored.batch_size, dtype=dtype, device=factored.device)
    with torch.no_grad():
        for uses in factored.contributions.values():
            squared += _squared_norms(uses, estimator, sketch_dim, generator, dtype)
    return squared.sqrt()


def _widest(factored: Factored) -> torch.dtype:
    wide = any(p.dtype == torch.float64 for p in factored.parameters.values())
    return torch.float64 if wide else torch.float32


def _squared_norms(
    uses: list[Contribution],
    estimator: Estimator,
    sketch_dim: int,
    generator: torch.Generator | None,
    dtype: torch.dtype,
) -> Tensor:
    direct = [u for u in uses if isinstance(u, DirectGradients)]
    matrices: list[MatrixFactors] = [u for u in uses if not isinstance(u, DirectGradients)]
    if direct and matrices:
        direct += [
            _form(u, dtype) for u in matrices
        ]  # one parameter seen by a rule and by the fallback: add before taking the norm
        matrices = []
    if direct:
        total = direct[0].values_bn.to(dtype)
        for other in direct[1:]:
            total = total + other.values_bn.to(dtype)
        return total.pow(2).sum(dim=1)
    choice = choice_for(matrices, estimator, sketch_dim)
    if choice.estimator == "ghost":
        return ghost_norms(matrices, dtype)
    if choice.estimator == "materialized":
        return materialized_norms(matrices, dtype)
    if choice.estimator == "hutch":
        return hutch_norms(matrices, sketch_dim, generator, dtype)
    return hutch_plus_plus_norms(matrices, sketch_dim, generator, dtype)


def choice_for(uses: list[MatrixFactors], estimator: Estimator, sketch_dim: int) -> Choice:
    """The planner's choice for one parameter."""
    p, d = rows_and_columns(uses[0])
    t = sum(positions(u) for u in uses)
    return choose_estimator(estimator, t, p, d, sketch_dim, all(isinstance(u, OneHotFactors) for u in uses))


def _form(use: MatrixFactors, dtype: torch.dtype) -> DirectGradients:
    b = use.right_bgtd.shape[0]
    one = torch.ones(1, dtype=dtype, device=use.right_bgtd.device)
    rows = []
    for i in range(b):
        example = _example(use, i)
        p, d = rows_and_columns(use)
        shape = torch.Size((use.right_bgtd.shape[1] * p * d,))
        rows.append(weighted_sum(example, one, shape, dtype))
    return DirectGradients(torch.stack(rows))


def _example(use: MatrixFactors, i: int) -> MatrixFactors:
    if isinstance(use, OneHotFactors):
        return OneHotFactors(use.ids_bt[i : i + 1], use.right_bgtd[i : i + 1], use.rows)
    return type(use)(use.left_bgtp[i : i + 1], use.right_bgtd[i : i + 1])


def add_clipped(sums: dict[str, Tensor], factored: Factored, norms: Tensor, max_grad_norm: float) -> None:
    """Adds sum_i min(1, C / norm_i) g_i to ``sums``, parameter by parameter; an example with a non-finite norm adds exactly zero."""
    with torch.no_grad():
        finite = norms.isfinite()
        factors = torch.where(finite, (max_grad_norm / norms).clamp(max=1.0), torch.zeros_like(norms))
        all_finite = bool(finite.all())
        for name, uses in factored.contributions.items():
            for use in uses:
                kept = use if all_finite else keep_examples(use, finite)
                sums[name] += weighted_sum(kept, factors, factored.parameters[name].shape, sums[name].dtype)
