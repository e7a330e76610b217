"""Per-example norms and what is needed for the weighted sum, collected while a micro-batch's
backward pass runs.

A parameter is settled when the last of its uses has arrived: its squared norms are added, and
either its factors or its per-example gradients are kept until the clip factors are known. Memory:
what is kept, plus one block of temporaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from quietgrad.clipping.capture.capture import Recording, Use
from quietgrad.clipping.capture.layout import Layout, Site
from quietgrad.clipping.engines.at_once import AtOnce, weight_and_bias
from quietgrad.clipping.engines.contributions import contributions_of
from quietgrad.clipping.engines.untouched import (
    Versions,
    are_same_norms,
    require_same_norms,
    require_untouched,
    versions_of,
)
from quietgrad.clipping.engines.ways import in_one_way, small_gradients
from quietgrad.clipping.norms.choice import ESTIMATOR_OF, Choice, Policy
from quietgrad.clipping.norms.coarseness import refuse_coarser
from quietgrad.clipping.norms.cost import Sketch, cost_of
from quietgrad.clipping.norms.estimators.materialized import added_up, kept_gradients
from quietgrad.clipping.norms.estimators.projections import Projections, block_of
from quietgrad.clipping.norms.estimators.sketches import steady
from quietgrad.clipping.norms.factors import (
    ByExtent,
    Contribution,
    DenseFactors,
    DirectGradients,
    Given,
    Kept,
    ListedGradients,
    MatrixFactors,
    by_extent,
    formed,
)
from quietgrad.clipping.norms.factors.direct import Side
from quietgrad.clipping.norms.factors.extents import Part
from quietgrad.clipping.norms.factors.groups import RowGroups
from quietgrad.clipping.norms.factors.products import of_dtype
from quietgrad.clipping.norms.factors.sums.scratch import Scratch
from quietgrad.clipping.norms.rounding import (
    Measured,
    Norms,
    NormSums,
    direct,
    of_this_process,
)
from quietgrad.tensors import accumulation_dtype, full_precision

Sums = dict[str, Tensor]

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
    _at_once: AtOnce = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._at_once = AtOnce(self.scratch, self.sums, self.least_times)

    def receive(self, use: Use) -> None:
        """Takes one call's inputs and output gradients; called from the backward pass."""
        refuse_coarser(use.site.name, use.tensors, self.least_times)
        # In the user's own precision: the fallback repeats the module's forward pass.
        found = contributions_of(use, self.groups.rows, self.recording, self.projections)
        with full_precision():
            beside = self._settle_with_bias(use.site, found)
            for name, given in found.items():
                cut = self.layout.cut
                if name in beside or (cut is not None and not cut.counts(name)):
                    continue  # another rank has the same, and counts it
                contribution = formed(given)
                if not self.groups.single:
                    contribution = contribution.merged(self.groups)
                self._waiting.setdefault(name, []).append(contribution)
                if self._is_last(name, len(self._waiting[name])):
                    self._settle(name)

    def finish(self) -> Norms:
        """Norms of the whole gradients, once the backward pass is over."""
        with full_precision():
            for name in list(self._waiting):
                self._settle(name)
            self._at_once.measure()
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
                calls = recording.calls.get(site.name, 0)
                for owner in site.parameters.values():
                    self._expected[owner] = self._expected.get(owner, 0) + calls
        return arrived == self._expected.get(name)

    def _settle(self, name: str) -> None:
        uses = self._waiting.pop(name)
        if self.policy_of(name).steady:
            uses = in_one_way(self.layout, name, uses)
        entries = self.layout.shape_of(name).numel()
        small = None if self.twice else small_gradients(uses)
        measured: Measured | None = None
        kept: list[Kept]
        if len(uses) == 1 and self._waits([name], uses[0]):
            kept = [*uses]
        elif small is None:
            measured, kept = self._measure(name, uses)
            if any(isinstance(use, DirectGradients | MADE_HERE) for use in kept):
                self._kept_entries += entries * len(measured.squared)
            self.sums.add(self.group_of(name), measured, entries)
        else:
            kept = [small]
            dtype = accumulation_dtype(self.layout.parameters[name].dtype)
            values = of_dtype(small.values_bn, dtype)
            self._at_once.add_small(self.group_of(name), values, small.spread_b)
        self._keep(name, kept)
        made_here = any(isinstance(use, MADE_HERE) for use in kept)
        if self.keep and self.twice and measured is not None and not made_here:
            self._measured[name] = measured

    def _keep(self, name: str, kept: list[Kept]) -> None:
        if self.keep:
            assert name not in self.kept, name  # else the uses of a tied parameter were miscounted
            self.kept[name] = kept
            self._versions[name] = versions_of(kept)

    def _settle_with_bias(self, site: Site, found: Mapping[str, Given]) -> tuple[str, ...]:
        """Settles a layer's weight and bias in one ghost norm, where each is used here alone;
        returns their names, or none.
        """
        both = weight_and_bias(site, found)
        if both is None or self.layout.cut is not None or not self.groups.single:
            return ()
        names = (both.weight, both.bias)
        groups = {self.group_of(name) for name in names}
        dtypes = {accumulation_dtype(self.layout.parameters[name].dtype) for name in names}
        steady = any(self.policy_of(name).steady for name in names)
        if len(groups) + len(dtypes) > 2 or steady or not all(self._is_last(n, 1) for n in names):
            return ()
        if not self._waits(names, both.factors, both.ones):
            return ()
        self._keep(both.weight, [both.factors])
        self._keep(both.bias, [both.rows])
        return names

    def _waits(self, names: Sequence[str], use: Contribution, ones: Side | None = None) -> bool:
        """Whether the one use of a parameter, the first of ``names``, is measured together with
        others', to whom it is given; ``ones``: with its layer's bias, the second of them.
        """
        if self.twice or not isinstance(use, DenseFactors):
            return False
        name = names[0]
        choice = self._policy_of(name).choose(cost_of([use]))
        if not self._at_once.takes(use, choice):
            return False
        sketch = self._sketch(name, choice) if choice.estimator == "hutch" else None
        entries = sum(self.layout.shape_of(one).numel() for one in names)
        dtype = accumulation_dtype(self.layout.parameters[name].dtype)
        self._at_once.add(self.group_of(name), entries, use, sketch, dtype, ones)
        return True

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
        whole = Measured(*self.sums.squared.new_zeros(5, self.sums.squared.shape[1]))
        kept: list[tuple[Tensor, tuple[Kept, ...]]] = []
        for numbers, matrices in parts:
            measured, some = self._measure_matrices(name, matrices, dtype)
            for known, total in zip(vars(measured).values(), vars(whole).values(), strict=True):
                if known is not None:
                    total[numbers] = known
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
            sketch = self._sketch(name, choice)
            measured = ESTIMATOR_OF[choice.estimator].norms(matrices, sketch, dtype)
        if policy.steady and choice.estimator == "materialized":
            measured = steady(measured, matrices, dtype)
        # Beside sketches margins do what a least divisor of float32 does.
        known = policy.steady and self.least_times == 1.0
        return replace(measured, least=None) if known else measured, kept

    def _sketch(self, name: str, choice: Choice) -> Sketch:
        # Norms of different groups are clipped apart: nothing random may be common to them.
        block = f"{block_of(name)}\x00{self.group_of(name)}"
        stream = name if self.layout.cut is None else self.layout.cut.stream(name)
        return Sketch(stream, choice.sketch_dim, self.projections, self.scratch, block)

    def _policy_of(self, name: str) -> Policy:
        policy, entries = self.policy_of(name), self.layout.shape_of(name).numel()
        left = self.most_kept - self._kept_entries
        if entries * len(self.groups.sizes) <= left:
            return policy
        return policy._replace(may_keep=False)

    def gradient_of(self, example: int) -> dict[str, Tensor]:
        """One example's gradient by parameter, formed from what was kept: what is measured of it is
        what can be added. Memory: one gradient.
        """
        return {name: self.gradient_at(name, example) for name in self.kept}

    def gradient_at(self, name: str, example: int) -> Tensor:
        """One example's gradient of one parameter that something was kept of."""
        uses, shape = self.kept[name], self.layout.shape_of(name)
        require_untouched(name, self._versions[name])
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
        rows = weights.unbind(0)
        with full_precision():  # once: looking it up costs more than a small sum
            for name in list(self.kept):
                self._add_weighted_of(name, sums, rows[self.group_of(name)], left_out)

    def add_weighted_of(
        self, name: str, sums: Sums, weights: Tensor, left_out: Tensor | None
    ) -> None:
        """``add_weighted`` for one parameter that something was kept of."""
        with full_precision():
            self._add_weighted_of(name, sums, weights[self.group_of(name)], left_out)

    def _add_weighted_of(self, name: str, sums: Sums, row: Tensor, left_out: Tensor | None) -> None:
        shape = self.layout.shape_of(name)
        dtype = accumulation_dtype(self.layout.parameters[name].dtype)
        kept = self.kept.pop(name)
        require_untouched(name, self._versions.pop(name))
        for use in kept:
            known = use if left_out is None else use.without(left_out)
            sums[name] = known.weighted_sum(row, shape, dtype, sums.get(name))
