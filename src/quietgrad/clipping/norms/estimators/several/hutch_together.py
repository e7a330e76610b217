"""Hutchinson's estimates of several parameters: sketches are taken as factors come, and what bounds
their rounding, some forty operations on a few numbers each, is found for many of them at once.

Every number is that of the parameter alone. Memory: ``MOST`` times the norms of its factors' rows.
Shape legend: m parameters that wait, b examples, t positions, x = m b.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from quietgrad.clipping.norms.cost import Sketch
from quietgrad.clipping.norms.estimators.hutch import sketch_of
from quietgrad.clipping.norms.estimators.sketches import own_rounding, tail_margin
from quietgrad.clipping.norms.factors import DenseFactors
from quietgrad.clipping.norms.factors.rows import row_norms
from quietgrad.clipping.norms.factors.sums.scratch import Scratch
from quietgrad.clipping.norms.rounding import (
    MOST_COUNTED,
    Measured,
    NormSums,
    least_of,
    norm_gamma,
    squared_norms,
)
from quietgrad.clipping.norms.spread import spread_from_norms
from quietgrad.sending import numbers_beside

MOST = 32


class Waiting(NamedTuple):
    """One parameter whose sketch is taken."""

    group: int
    entries: int
    longest: int  # of the rows of either factor
    margin: float  # of the sketch and of the sum, in units of the spread


@dataclass
class HutchTogether:
    """Parameters of one micro-batch whose bounds wait. Private.

    Attributes:
        scratch: where norms of rows lie.
        sums: what norms are added to.
        least: whether least divisors are wanted.
    """

    scratch: Scratch
    sums: NormSums
    least: bool = True
    _waiting: list[Waiting] = field(default_factory=list, repr=False)
    _squares: list[Tensor] = field(default_factory=list, repr=False)
    _room: Tensor | None = field(default=None, repr=False)

    def add(
        self, group: int, entries: int, use: DenseFactors, sketch: Sketch, dtype: torch.dtype
    ) -> None:
        """Takes the sketch of one parameter, and bounds those that wait where that is due.

        Args:
            group: of the parameter's norms.
            entries: of the parameter.
            use: its one use, of one block.
            sketch: how it is sketched.
            dtype: of the norms.
        """
        name, k, projections, _, block = sketch
        made, columns = sketch_of([use], block or name, k, projections, dtype, self.scratch)
        self._squares.append(squared_norms(made))
        self._keep_norms(use, dtype)
        own = own_rounding([use], made, dtype)
        margin = tail_margin([use], columns, k, made, dtype) + MOST_COUNTED * own.of_spread
        assert isinstance(margin, float), "of a single dense use all bounds are one number"
        s = use.sizes
        self._waiting.append(Waiting(group, entries, max(s.p, s.d), margin))
        if len(self._waiting) == MOST:
            self.measure()

    def _keep_norms(self, use: DenseFactors, dtype: torch.dtype) -> None:
        s = use.sizes
        shape = (MOST, 2, s.b, s.t)
        if self._room is not None and (self._room.shape != shape or self._room.dtype != dtype):
            last = self._squares.pop()
            self.measure()
            self._squares.append(last)
        if self._room is None:
            like = torch.empty(0, dtype=dtype, device=use.like.device)
            self._room = self.scratch.take("norms of rows that wait", shape, like)
        for side, factor in enumerate((use.right_bgtd, use.left_bgtp)):
            known = self.scratch.norms_of(("right", "left")[side], factor)
            norms = row_norms(factor, dtype) if known is None else known
            self._room[len(self._waiting), side].copy_(norms[:, 0])

    def measure(self) -> None:
        """Adds the norms of all that wait, which then wait no more."""
        waiting, squares, room = self._waiting, self._squares, self._room
        self._waiting, self._squares, self._room = [], [], None
        if not waiting or room is None:
            return
        m, b = len(waiting), room.shape[2]
        squared = torch.cat(squares)
        longest, margins = (
            numbers_beside(each, squared).repeat_interleave(b)
            for each in zip(*((one.longest, one.margin) for one in waiting), strict=True)
        )
        spread = spread_from_norms(room[:m].transpose(0, 1).flatten(1, 2), longest, room.dtype)
        slack = torch.add(spread.lost, squared, alpha=norm_gamma(squared, room.dtype))
        bound = spread.norm.mul_(margins)
        least = least_of(spread.plain) if self.least else None
        found = Measured(squared, slack, bound, least, spread.terms)
        self.sums.add_several([o.group for o in waiting], found, [o.entries for o in waiting])
