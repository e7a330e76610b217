"""Ghost norms of several parameters at once: Gram matrices of few positions wait for each other.

A ghost norm of a short text is two small products and some thirty operations on a few numbers each,
once a parameter and micro-batch. Of Gram matrices that lie side by side those are made once.
A bias is one more column of its layer's weight, whose input is 1 at every position: its squared
norm is there once 1 is added to the inputs' inner products.
Memory: ``ENTRIES`` numbers an example for either factor.
Shape legend: m parameters that wait, b examples, x parameters and examples together, t positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from quietgrad.clipping.norms.estimators import ghost
from quietgrad.clipping.norms.factors import DenseFactors
from quietgrad.clipping.norms.factors.direct import Side
from quietgrad.clipping.norms.factors.matrix import Sizes
from quietgrad.clipping.norms.factors.products import write_gram_products
from quietgrad.clipping.norms.factors.rows import is_same, norms_from_squares, sums_over_positions
from quietgrad.clipping.norms.factors.sums.scratch import Scratch
from quietgrad.clipping.norms.rounding import Measured, NormSums
from quietgrad.clipping.norms.spread import (
    Spread,
    beside_bias,
    diagonal_norms,
    margin_and_least,
    spread_from,
)
from quietgrad.sending import numbers_beside

# Of one example's Gram matrices that wait, on either side. Of one example: how many parameters are
# measured together must not depend on how many examples there are.
ENTRIES = 2**14


class Waiting(NamedTuple):
    """One parameter whose Gram matrices are formed."""

    group: int
    entries: int
    errors: ghost.Errors
    longest: int  # of the rows of either factor
    ones: Side | None  # the factor that gets a column of ones


@dataclass
class Together:
    """Parameters of one micro-batch whose Gram matrices wait. Private.

    Attributes:
        scratch: where they lie.
        sums: what norms are added to.
    """

    scratch: Scratch
    sums: NormSums
    _waiting: list[Waiting] = field(default_factory=list, repr=False)
    _errors: dict[tuple[Sizes, int], ghost.Errors] = field(default_factory=dict, repr=False)
    _room: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    _before: tuple[Tensor, int] | None = field(default=None, repr=False)

    def takes(self, use: DenseFactors) -> bool:
        """Whether ghost norms of a parameter's one use may wait: where positions are few."""
        s = use.sizes
        return s.g == 1 and s.t > 1 and 2 * s.t * s.t <= ENTRIES

    def add(
        self,
        group: int,
        entries: int,
        use: DenseFactors,
        dtype: torch.dtype,
        ones: Side | None = None,
    ) -> None:
        """Forms one parameter's Gram matrices, and measures those that wait where that is due.

        Args:
            group: of the parameter's norms.
            entries: of the parameter, and of its layer's bias where that is measured with it.
            use: its one use.
            dtype: of the norms.
            ones: the factor, the layer's input, that gets a column of ones, for a bias.
        """
        s = use.sizes
        most, shape = ENTRIES // (s.t * s.t), (s.b, s.t, s.t)
        if self._room is not None and (
            self._room[0].shape[1:] != shape or self._room[0].dtype != dtype
        ):
            self.measure()
        if self._room is None:
            like = torch.empty(0, dtype=dtype, device=use.like.device)
            self._room = (
                self.scratch.take("right Gram matrices", (most, *shape), like),
                self.scratch.take("left Gram matrices", (most, *shape), like),
            )
        number = len(self._waiting)
        right, left = self._room[0][number], self._room[1][number]
        x = use.right_bgtd
        if number and self._before is not None and is_same(*self._before, x):
            right.copy_(self._room[0][number - 1])  # queries, keys and values
        else:
            write_gram_products(x, right)
        write_gram_products(use.left_bgtp, left)
        self._before = (x, x._version)
        more = 0 if ones is None else 1
        errors = self._errors.get((s, more))  # layers of one shape have the same
        if errors is None:
            errors = self._errors[s, more] = ghost.errors_of([use], dtype, more)
        self._waiting.append(Waiting(group, entries, errors, max(s.p, s.d) + more, ones))
        if number + 1 == most:
            self.measure()

    def measure(self) -> None:
        """Adds the norms of all that wait, which then wait no more."""
        waiting, room = self._waiting, self._room
        self._waiting, self._errors, self._room, self._before = [], {}, None, None
        if not waiting or room is None:
            return
        right, left = (side[: len(waiting)].flatten(0, 1) for side in room)
        found = _measured(right, left, waiting)
        self.sums.add_several([o.group for o in waiting], found, [o.entries for o in waiting])


def _add_ones(grams_mbtt: Tensor, where: Sequence[float]) -> None:
    """Of a column of ones, for the parameters that have one."""
    if all(where):
        grams_mbtt.add_(1.0)
    elif any(where):
        grams_mbtt.add_(numbers_beside(where, grams_mbtt).view(-1, 1, 1, 1))


def _measured(right_xtt: Tensor, left_xtt: Tensor, waiting: Sequence[Waiting]) -> Measured:
    x, t, _ = right_xtt.shape
    # Each parameter's own: which others wait with it follows from the micro-batch's length.
    longest = numbers_beside([one.longest for one in waiting], right_xtt)
    longest = longest.repeat_interleave(x // len(waiting))
    apart, of_bias = None, _spreads_of_biases(right_xtt, left_xtt, waiting)
    if of_bias is not None:
        apart = _spread(_row_norms(right_xtt, left_xtt, longest), longest)
        sides: dict[Side, Tensor] = {"right": right_xtt, "left": left_xtt}
        for side, grams in sides.items():
            where = [float(one.ones == side) for one in waiting]
            _add_ones(grams.unflatten(0, (len(waiting), -1)), where)
    norms = _row_norms(right_xtt, left_xtt, longest)
    sums = ghost.sums_at_once(right_xtt, left_xtt, norms)
    spread = _spread(norms, longest)
    if apart is not None and of_bias is not None:
        spread = beside_bias(spread, apart, of_bias)
    of_right, of_left, lost = (
        numbers_beside(some, sums).repeat_interleave(x // len(waiting))
        for some in zip(
            *((e.of_right, e.of_left, e.lost) for e in (one.errors for one in waiting)), strict=True
        )
    )
    errors = ghost.Errors(of_right, of_left, waiting[0].errors.of_products, lost)
    bounds = margin_and_least(spread, t, right_xtt, right_xtt.dtype)
    return Measured(sums[0].clamp_min(0), ghost.slack_of(sums, spread, errors), *bounds)


def _row_norms(right_xtt: Tensor, left_xtt: Tensor, longest_x: Tensor) -> Tensor:
    """[2, x, t] |a| and |g|."""
    squares = [gram.diagonal(dim1=1, dim2=2) for gram in (right_xtt, left_xtt)]
    return norms_from_squares(torch.stack(squares), longest_x.unsqueeze(1))


def _spread(norms_2xt: Tensor, longest_x: Tensor) -> Spread:
    sums = sums_over_positions(norms_2xt.unsqueeze(2))
    return spread_from(*sums, longest_x, norms_2xt.dtype)


def _spreads_of_biases(
    right_xtt: Tensor, left_xtt: Tensor, waiting: Sequence[Waiting]
) -> Tensor | None:
    """[x] of the layers' biases, whose rows are the factor beside the ones; 0 without a bias."""
    found: Tensor | None = None
    sides: dict[Side, Tensor] = {"right": left_xtt, "left": right_xtt}
    for side, rows in sides.items():
        where = [one.ones == side for one in waiting]
        if any(where):
            sums = diagonal_norms(rows)
            here = numbers_beside(where, sums, torch.bool).repeat_interleave(
                len(sums) // len(where)
            )
            found = torch.where(here, sums, 0.0 if found is None else found)
    return found
