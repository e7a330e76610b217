"""Per-example norms and what is needed for the weighted sum, collected while a micro-batch's backward pass runs.

A parameter is settled when the last of its uses has arrived: its squared norms are added, and either its factors or its per-example gradients
are kept until the clip factors are known. Memory: what is kept, plus one block of temporaries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quietgrad.clipping.capture import Recording, Use, input_of
from quietgrad.clipping.estimators import (
    ghost_norms,
    hutch_norms,
    hutch_plus_plus_norms,
    kernel_gradients,
    materialized_gradients,
    materialized_norms,
    squared_norms,
)
from quietgrad.clipping.factors import (
    Contribution,
    ConvolutionFactors,
    DirectGradients,
    Kept,
    MatrixFactors,
    keep_examples,
    weighted_sum,
)
from quietgrad.clipping.fallback import fallback_contributions
from quietgrad.clipping.layout import Layout
from quietgrad.clipping.planner import Choice, Policy, cost_of
from quietgrad.tensors import accumulation_dtype

Sums = dict[str, Tensor]


@dataclass
class Tally:
    """One micro-batch's per-example gradients, parameter by parameter.

    Attributes:
        layout: sites and parameters.
        examples: b.
        policy_of: parameter name -> how its estimator is chosen.
        group_of: parameter name -> row of ``squared`` that its norms go to.
        squared: [groups, b] squared norms of what is settled.
        generator: source of random projections.
        keep: False where only norms are wanted (second backward pass).
        recording: set before the forward pass.
    """

    layout: Layout
    examples: int
    policy_of: Callable[[str], Policy]
    group_of: Callable[[str], int]
    squared: Tensor
    generator: torch.Generator | None
    keep: bool = True
    recording: Recording | None = None
    kept: dict[str, list[Kept]] = field(default_factory=dict)
    _waiting: dict[str, list[Contribution]] = field(default_factory=dict)
    _expected: dict[str, int] | None = None

    def receive(self, use: Use) -> None:
        """Takes one call's inputs and output gradients; called from the backward pass."""
        for name, contribution in contributions_of(use, self.examples, self.recording).items():
            waiting = self._waiting.setdefault(name, [])
            waiting.append(contribution)
            if self._is_last(name, len(waiting)):
                self._settle(name)

    def finish(self) -> Tensor:
        """[groups, b] norms, once the backward pass is over."""
        for name in list(self._waiting):
            self._settle(name)
        return self.squared.sqrt()

    def _is_last(self, name: str, arrived: int) -> bool:
        recording = self.recording
        # Reentrant checkpointing shows its calls during the backward pass only: how many there will be is not known before the end.
        if recording is None or recording.attach_all:
            return False
        if self._expected is None:
            self._expected = {}
            for site in self.layout.sites:
                for owner in site.parameters.values():
                    self._expected[owner] = self._expected.get(owner, 0) + recording.calls.get(site.name, 0)
        return arrived == self._expected.get(name)

    def _settle(self, name: str) -> None:
        uses = self._waiting.pop(name)
        dtype = accumulation_dtype(self.layout.parameters[name].dtype)
        squared, kept = settle(uses, self.policy_of(name), self.generator, dtype)
        self.squared[self.group_of(name)] += squared
        if self.keep:
            # A use of a tied parameter may arrive after the others were settled only if calls were miscounted.
            assert name not in self.kept, name
            self.kept[name] = kept

    def add_weighted(self, sums: Sums, weights: Tensor, finite: Tensor) -> None:
        """Adds sum_i weights_i g_i to ``sums`` and lets go of what was kept; a parameter without a sum yet gets one.

        Args:
            sums: parameter name -> sum so far.
            weights: [groups, b] clip factors.
            finite: [b] examples whose norms are finite; the others add exactly zero.
        """
        all_finite = bool(finite.all())
        for name in list(self.kept):
            parameter = self.layout.parameters[name]
            dtype = accumulation_dtype(parameter.dtype)
            row = weights[self.group_of(name)]
            for use in self.kept.pop(name):
                known = use if all_finite else keep_examples(use, finite)
                sums[name] = weighted_sum(known, row, parameter.shape, dtype, sums.get(name))


def contributions_of(use: Use, examples: int, recording: Recording | None) -> dict[str, Contribution]:
    """Parameter name -> per-example gradients of one call, by the module's rule or by the fallback."""
    site = use.site
    if site.rule is not None:
        found = site.rule(site.module, input_of(use), use.output_gradients[0], site.parameters)
    elif recording is None:
        found = dict(fallback_contributions(use, examples))
    else:
        with recording.pause():
            found = dict(fallback_contributions(use, examples))
    return {site.parameters[local]: contribution for local, contribution in found.items()}


def settle(
    uses: list[Contribution], policy: Policy, generator: torch.Generator | None, dtype: torch.dtype
) -> tuple[Tensor, list[Kept]]:
    """[b] squared norms of one parameter's per-example gradients, all its uses together, and what to keep of them."""
    matrices: list[MatrixFactors] = [u for u in uses if not isinstance(u, DirectGradients)]
    if len(matrices) < len(uses):
        # One parameter seen by a rule and by the fallback: add before taking the norm.
        total: Tensor | None = None
        if matrices:
            total = materialized_gradients(matrices, dtype).values_bn
        for use in uses:
            if isinstance(use, DirectGradients):
                values = use.values_bn.to(dtype)
                total = values if total is None else total + values
        assert total is not None
        return squared_norms(total), [DirectGradients(total)]
    choice = policy.choose(cost_of(matrices))
    if choice.kept and len(matrices) == 1 and isinstance(matrices[0], ConvolutionFactors) and not matrices[0].x.is_cuda:
        squared, listed = kernel_gradients(matrices[0], dtype)
        return squared, [listed]
    if choice.kept:
        gradients = materialized_gradients(matrices, dtype)
        return squared_norms(gradients.values_bn), [gradients]
    return _estimated(matrices, choice, generator, dtype), list(matrices)


def _estimated(
    matrices: list[MatrixFactors], choice: Choice, generator: torch.Generator | None, dtype: torch.dtype
) -> Tensor:
    if choice.estimator == "ghost":
        return ghost_norms(matrices, dtype)
    if choice.estimator == "materialized":
        return materialized_norms(matrices, dtype)
    if choice.estimator == "hutch":
        return hutch_norms(matrices, choice.sketch_dim, generator, dtype)
    return hutch_plus_plus_norms(matrices, choice.sketch_dim, generator, dtype)
