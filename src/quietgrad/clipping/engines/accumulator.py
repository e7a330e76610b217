"""Per-example norms and what is needed for the weighted sum, collected while a micro-batch's
backward pass runs.

A parameter is settled when the last of its uses has arrived: its squared norms are added, and
either its factors or its per-example gradients are kept until the clip factors are known. Memory:
what is kept, plus one block of temporaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from quietgrad.clipping.capture.capture import Recording, Use
from quietgrad.clipping.capture.layout import Layout
from quietgrad.clipping.engines.contributions import contributions_of
from quietgrad.clipping.engines.untouched import (
    Versions,
    are_same_norms,
    require_same_norms,
    require_untouched,
    versions_of,
)
from quietgrad.clipping.engines.ways import in_one_way, small_gradients
from quietgrad.clipping.norms.choice import ESTIMATOR_OF, Policy
from quietgrad.clipping.norms.coarseness import refuse_coarser
from quietgrad.clipping.norms.cost import Sketch, cost_of
from quietgrad.clipping.norms.estimators.materialized import added_up, kept_gradients
from quietgrad.clipping.norms.estimators.projections import Projections, block_of
from quietgrad.clipping.norms.estimators.sketches import steady
from quietgrad.clipping.norms.estimators.together import Together
from quietgrad.clipping.norms.factors import (
    ByExtent,
    Contribution,
    DenseFactors,
    DirectGradients,
    Kept,
    ListedGradients,
    MatrixFactors,
    by_extent,
)
from quietgrad.clipping.norms.factors.extents import Part
from quietgrad.clipping.norms.factors.groups import RowGroups
from quietgrad.clipping.norms.factors.sums.scratch import Scratch
from quietgrad.clipping.norms.rounding import (
    Measured,
    Norms,
    NormSums,
    direct,
    least_of,
    of_this_process,
)
from quietgrad.tensors import accumulation_dtype, full_precision

Sums = dict[str, Tensor]

# Entries of all that wait for each other. Of one example: how they are added up must not depend on
# how many examples there are.
TOGETHER = 2**14


# In memory of their own: nobody else writes into it.
MADE_HERE = ListedGradients | ByExtent


def zero_sum(p: Tensor) -> Tensor:
    """The sum of no gradients of a parameter."""
    return torch.zeros_like(
        p,
        dtype=accumulation_dtype(p.dtype),
        memory_format=torch.contiguous_format,
        requires_grad=False,
    )


@dataclass
class Accumulator:
    """One micro-batch's per-example gradients, parameter by parameter.

    Attributes:
        layout: sites and parameters.
        groups: which rows of the batch make up each example.
        policy_of: parameter name -> how its estimator is chosen.
        group_of: parameter name -> row of ``sums`` that its norms go to.
        sums: squared norms of what is settled, with what rounding may have done to them.
        projections: of this release, for sketches.
        scratch: memory for what passes.
        keep: False where only norms are wanted.
        twice: whether norms are taken once more after the backward pass, and compared.
        most_kept: entries of per-example gradients that are kept of all matrices together; beyond
            them factors are kept.
        over_ranks: sums of this process to those of all that share the records.
        least_times: what least divisors are multiplied by (``norms.coarseness``).
        recording: set before the forward pass.
        losses: [examples * views], once the forward pass is over.
    """

    layout: Layout
    groups: RowGroups
    policy_of: Callable[[str], Policy]
    group_of: Callable[[str], int]
    sums: NormSums
    projections: Projections
    scratch: Scratch
    keep: bool = True
    twice: bool = False
    most_kept: float = math.inf
    over_ranks: Callable[[NormSums], NormSums] = of_this_process
    least_times: float = 1.0
    recording: Recording | None = None
    losses: Tensor | None = None
    kept: dict[str, list[Kept]] = field(default_factory=dict)
    _versions: dict[str, Versions] = field(default_factory=dict)
    _measured: dict[str, Measured] = field(default_factory=dict)
    _waiting: dict[str, list[Contribution]] = field(default_factory=dict)
    _expected: dict[str, int] | None = None
    _kept_entries: int = 0
    _small: dict[tuple[int, torch.dtype], list[Tensor]] = field(default_factory=dict)
    _together: Together = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._together = Together(self.scratch, self.sums)

    def receive(self, use: Use) -> None:
        """Takes one call's inputs and output gradients; called from the backward pass."""
        refuse_coarser(use.site.name, use.tensors, self.least_times)
        # In the user's own precision: the fallback repeats the module's forward pass.
        found = contributions_of(use, self.groups.rows, self.recording, self.projections)
        with full_precision():
            for name, contribution in found.items():
                if self.layout.cut is not None and not self.layout.cut.counts(name):
                    continue  # another rank has the same, and counts it
                waiting = self._waiting.setdefault(name, [])
                single = self.groups.single
                waiting.append(contribution if single else contribution.merged(self.groups))
                if self._is_last(name, len(waiting)):
                    self._settle(name)

    def finish(self) -> Norms:
        """Norms of the whole gradients, once the backward pass is over."""
        with full_precision():
            for name in list(self._waiting):
                self._settle(name)
            for group, dtype in list(self._small):
                self._measure_small(group, dtype)
            self._together.measure()
            same: dict[str, Tensor] = {}
            for name, before in self._measured.items():
                kept = self.kept[name]
                made_elsewhere = [use for use in kept if not isinstance(use, MADE_HERE)]
                uses = cast(list[Contribution], made_elsewhere)
                again, _ = self._measure(name, uses)
                same[name] = are_same_norms(before, again)
            require_same_norms(same)
        return self.over_ranks(self.sums).norms(self.least_times)

    def _is_last(self, name: str, arrived: int) -> bool:
        recording = self.recording
        # Reentrant checkpointing shows its calls during the backward pass only: how many there will
        # be is not known before the end.
        if recording is None or recording.attach_all:
            return False
        if self._expected is None:
            self._expected = {}
            for site in self.layout.sites:
                for owner in site.parameters.values():
                    self._expected[owner] = self._expected.get(owner, 0) + recording.calls.get(
                        site.name, 0
                    )
        return arrived == self._expected.get(name)

    def _settle(self, name: str) -> None:
        uses = self._waiting.pop(name)
        if self.policy_of(name).steady:
            uses = in_one_way(self.layout, name, uses)
        entries = self.layout.shape_of(name).numel()
        dtype = accumulation_dtype(self.layout.parameters[name].dtype)
        small = None if self.twice else small_gradients(uses)
        measured: Measured | None = None
        few = self._alone_and_few(name, uses)
        kept: list[Kept]
        if few is not None:
            kept = [few]
            self._together.add(self.group_of(name), entries, few, dtype)
        elif small is None:
            measured, kept = self._measure(name, uses)
            if any(isinstance(use, DirectGradients | MADE_HERE) for use in kept):
                self._kept_entries += entries * len(measured.squared)
            self.sums.add(self.group_of(name), measured, entries)
        else:
            kept = [small]
            self._wait(self.group_of(name), small.values_bn.to(dtype), small.spread_b)
        if self.keep:
            # A use of a tied parameter may arrive after the others were settled only if calls were
            # miscounted.
            assert name not in self.kept, name
            self.kept[name] = kept
            self._versions[name] = versions_of(kept)
            made_here = any(isinstance(use, MADE_HERE) for use in kept)
            if self.twice and measured is not None and not made_here:
                self._measured[name] = measured

    def _alone_and_few(self, name: str, uses: list[Contribution]) -> DenseFactors | None:
        """A parameter's one use whose ghost norm is taken together with others'."""
        use = uses[0]
        if self.twice or len(uses) > 1 or not isinstance(use, DenseFactors):
            return None
        if not self._together.takes(use) or use.extents() is not None:
            return None
        choice = self._policy_of(name).choose(cost_of([use]))
        return use if choice.estimator == "ghost" and not choice.kept else None

    def _measure(self, name: str, uses: list[Contribution]) -> tuple[Measured, list[Kept]]:
        """Norms of one parameter's per-example gradients, all its uses together, and what to keep
        of them.
        """
        dtype = accumulation_dtype(self.layout.parameters[name].dtype)
        matrices: list[MatrixFactors] = [u for u in uses if not isinstance(u, DirectGradients)]
        if len(matrices) < len(uses) or len({use.sizes.g for use in matrices}) > 1:
            # One parameter seen by a rule and by the fallback, or cut into blocks of rows in one
            # call and not in another (attention to itself and to something else): add before taking
            # the norm.
            total = added_up(uses, dtype)
            return direct(total.values_bn, total.spread_b), [total]
        parts = by_extent(matrices)
        if parts is not None:
            return self._measure_parts(name, parts, dtype)
        return self._measure_matrices(name, matrices, dtype)

    def _measure_parts(
        self, name: str, parts: list[Part], dtype: torch.dtype
    ) -> tuple[Measured, list[Kept]]:
        """Examples of one size at a time."""
        zeros = self.sums.squared.new_zeros(5, self.sums.squared.shape[1])
        whole, least, terms = Measured(*zeros), zeros[3], zeros[4]
        kept: list[tuple[Tensor, tuple[Kept, ...]]] = []
        for numbers, matrices in parts:
            measured, some = self._measure_matrices(name, matrices, dtype)
            whole.squared[numbers] = measured.squared
            whole.slack[numbers] = measured.slack
            whole.margin[numbers] = measured.margin
            if measured.least is not None:
                least[numbers] = measured.least
            if measured.terms is not None:
                terms[numbers] = measured.terms
            kept.append((numbers, tuple(some)))
        return whole, [ByExtent(tuple(kept))]

    def _measure_matrices(
        self, name: str, matrices: list[MatrixFactors], dtype: torch.dtype
    ) -> tuple[Measured, list[Kept]]:
        policy = self._policy_of(name)
        choice = policy.choose(cost_of(matrices))
        kept: list[Kept] = list(matrices)
        if choice.kept:
            measured, gradients = kept_gradients(matrices, dtype)
            kept = [gradients]
        else:
            # Norms of different groups are clipped apart: nothing random may be common to them.
            block = f"{block_of(name)}\x00{self.group_of(name)}"
            stream = name if self.layout.cut is None else self.layout.cut.stream(name)
            sketch = Sketch(stream, choice.sketch_dim, self.projections, self.scratch, block)
            measured = ESTIMATOR_OF[choice.estimator].norms(matrices, sketch, dtype)
        if policy.steady and choice.estimator == "materialized":
            measured = steady(measured, matrices, dtype)
        # Beside sketches margins do what a least divisor of float32 does.
        known = policy.steady and self.least_times == 1.0
        return replace(measured, least=None) if known else measured, kept

    def _policy_of(self, name: str) -> Policy:
        policy, entries = self.policy_of(name), self.layout.shape_of(name).numel()
        left = self.most_kept - self._kept_entries
        if entries * len(self.groups.sizes) <= left:
            return policy
        return replace(policy, may_keep=False)

    def _wait(self, group: int, values_bn: Tensor, spread_b: Tensor | None) -> None:
        """Biases and scales are many and small: they are measured together."""
        if spread_b is not None:
            self.sums.add_least(group, least_of(spread_b))
        waiting = self._small.setdefault((group, values_bn.dtype), [])
        waiting.append(values_bn)
        if sum(values.shape[1] for values in waiting) > TOGETHER:
            self._measure_small(group, values_bn.dtype)

    def _measure_small(self, group: int, dtype: torch.dtype) -> None:
        joined = torch.cat(self._small.pop((group, dtype)), dim=1)
        self.sums.add(group, direct(joined), joined.shape[1])

    def gradient_of(self, example: int) -> dict[str, Tensor]:
        """One example's gradient by parameter, formed from what was kept: what is measured of it is
        what can be added. Memory: one gradient.
        """
        return {name: self.gradient_at(name, example) for name in self.kept}

    def gradient_at(self, name: str, example: int) -> Tensor:
        """One example's gradient of one parameter that something was kept of."""
        uses, shape = self.kept[name], self.layout.shape_of(name)
        require_untouched(name, uses, self._versions[name])
        span, weight = slice(example, example + 1), self.sums.squared.new_ones(1)
        dtype = accumulation_dtype(self.layout.parameters[name].dtype)
        made: Tensor | None = None
        with full_precision():
            for use in uses:
                made = use.examples(span).weighted_sum(weight, shape, dtype, made)
        assert made is not None
        return made

    def add_weighted(self, sums: Sums, weights: Tensor, left_out: Tensor | None) -> None:
        """Adds sum_i weights_i g_i to ``sums`` and lets go of what was kept; a parameter without a
        sum yet gets one.

        Args:
            sums: parameter name -> sum so far.
            weights: [groups, b] clip factors.
            left_out: [b] examples that add exactly zero, whatever their gradients hold; None for
                none.
        """
        with full_precision():  # once: setting it costs more than a small sum
            for name in list(self.kept):
                self.add_weighted_of(name, sums, weights, left_out)

    def add_weighted_of(
        self, name: str, sums: Sums, weights: Tensor, left_out: Tensor | None
    ) -> None:
        """``add_weighted`` for one parameter that something was kept of."""
        shape = self.layout.shape_of(name)
        dtype = accumulation_dtype(self.layout.parameters[name].dtype)
        row = weights[self.group_of(name)]
        kept = self.kept.pop(name)
        require_untouched(name, kept, self._versions[name])
        with full_precision():
            for use in kept:
                known = use if left_out is None else use.without(left_out)
                sums[name] = known.weighted_sum(row, shape, dtype, sums.get(name))
