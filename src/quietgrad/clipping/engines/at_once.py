"""Norms of many parameters at once: each is a few products and dozens of operations on a few
numbers, which for all that wait are made together. Ghost norms of long texts are their products;
they do not wait, and take in their layers' biases all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from quietgrad.clipping.capture.layout import Site
from quietgrad.clipping.norms.choice import Choice
from quietgrad.clipping.norms.cost import Sketch
from quietgrad.clipping.norms.estimators.ghost import ghost_norms, in_one_tile
from quietgrad.clipping.norms.estimators.several.hutch_together import HutchTogether
from quietgrad.clipping.norms.estimators.several.rank_one import RankOne
from quietgrad.clipping.norms.estimators.several.small import Small
from quietgrad.clipping.norms.estimators.several.together import Together
from quietgrad.clipping.norms.factors import DenseFactors, Given, SummedRows
from quietgrad.clipping.norms.factors.direct import Side
from quietgrad.clipping.norms.factors.sums.scratch import Scratch
from quietgrad.clipping.norms.rounding import NormSums


class WeightAndBias(NamedTuple):
    """Of one layer, by their names, whose gradients are sums of the same rows."""

    weight: str
    bias: str
    factors: DenseFactors
    rows: SummedRows
    ones: Side  # the factor that is the layer's input: a bias is a column of the weight there


def weight_and_bias(site: Site, found: Mapping[str, Given]) -> WeightAndBias | None:
    """What a layer's rule found of the two; None of other layers."""
    weight, bias = (site.parameters.get(local, "") for local in ("weight", "bias"))
    factors, rows = found.get(weight), found.get(bias)
    if not isinstance(factors, DenseFactors) or not isinstance(rows, SummedRows):
        return None
    if rows.factor_of_weight is None:
        return None
    if factors.sizes.t == 1:  # users of one record are measured as records, to the bit
        return None
    ones: Side = "left" if rows.factor_of_weight == "right" else "right"
    return WeightAndBias(weight, bias, factors, rows, ones)


@dataclass
class AtOnce:
    """Parameters of one micro-batch that wait for each other. Private.

    Attributes:
        scratch: memory for what passes.
        sums: what norms are added to.
        least_times: what least divisors are multiplied by.
    """

    scratch: Scratch
    sums: NormSums
    least_times: float = 1.0
    _small: Small = field(init=False, repr=False)
    _ghost: Together = field(init=False, repr=False)
    _rank_one: RankOne = field(init=False, repr=False)
    _hutch: HutchTogether = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._small = Small(self.sums)
        self._ghost = Together(self.scratch, self.sums)
        self._rank_one = RankOne(self.sums)
        # Beside sketches margins do what a least divisor of float32 does.
        self._hutch = HutchTogether(self.scratch, self.sums, self.least_times != 1.0)

    def takes(self, use: DenseFactors, choice: Choice) -> bool:
        """Whether a parameter's one use is measured here."""
        if choice.kept or use.sizes.g > 1 or use.extents() is not None:
            return False
        if choice.estimator == "ghost":
            return in_one_tile(use) or self._rank_one.takes(use)
        return choice.estimator == "hutch"

    def add(
        self,
        group: int,
        entries: int,
        use: DenseFactors,
        sketch: Sketch | None,
        dtype: torch.dtype,
        ones: Side | None = None,
    ) -> None:
        """One parameter that is measured here.

        Args:
            group: of the parameter's norms.
            entries: of the parameter, and of its layer's bias where that is measured with it.
            use: its one use.
            sketch: how it is sketched; None for its ghost norm.
            dtype: of the norms.
            ones: for a bias, see ``Together.add``.
        """
        if sketch is not None:
            self._hutch.add(group, entries, use, sketch, dtype)
        elif self._rank_one.takes(use):
            assert ones is None, "a bias would be left out of the norm"
            self._rank_one.add(group, entries, use, dtype)
        elif self._ghost.takes(use):
            self._ghost.add(group, entries, use, dtype, ones)
        else:
            self.sums.add(group, ghost_norms([use], dtype, ones=ones), entries)

    def add_small(self, group: int, values_bn: Tensor, spread_b: Tensor | None) -> None:
        """See ``Small.add``."""
        self._small.add(group, values_bn, spread_b)

    def measure(self) -> None:
        """Adds the norms of all that wait, which then wait no more."""
        for waiting in (self._small, self._ghost, self._rank_one, self._hutch):
            waiting.measure()
