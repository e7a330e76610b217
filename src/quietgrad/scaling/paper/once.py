"""Norms of gradients of equal sizes are taken once on paper: thousands of small operations on
shapes, which hold the same on top of what is there whenever they are run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from quietgrad.clipping.engines import accumulator
from quietgrad.clipping.norms import choice
from quietgrad.clipping.norms.cost import NormEstimator, Sketch, cost_of
from quietgrad.clipping.norms.factors import DirectGradients, Kept, MatrixFactors
from quietgrad.clipping.norms.rounding import Measured
from quietgrad.scaling.paper.held import Held

Known = dict[object, int]  # estimator and sizes of norms -> bytes over what was there


@contextlib.contextmanager
def measured_once(held: Held, known: Known) -> Iterator[None]:
    """Inside, estimators run for sizes that are not known yet; for the others what they held comes
    and goes, and the norms are zeros.
    """
    ways, kept = dict(choice.ESTIMATOR_OF), accumulator.kept_gradients
    table: Any = choice.ESTIMATOR_OF
    keeps: Any = accumulator
    try:
        table.update({name: _Once(name, way, held, known) for name, way in ways.items()})
        keeps.kept_gradients = _kept_once(kept, held, known)
        yield
    finally:
        table.update(ways)
        keeps.kept_gradients = kept


class _Once:
    """An estimator that remembers what it held, by the sizes of what it measured."""

    def __init__(self, name: str, way: NormEstimator, held: Held, known: Known) -> None:
        self._name, self._way, self._held, self._known = name, way, held, known
        self.multiplications, self.traffic = way.multiplications, way.traffic

    def norms(self, uses: Sequence[MatrixFactors], sketch: Sketch, dtype: torch.dtype) -> Measured:
        """See ``NormEstimator``."""
        key = (self._name, cost_of(uses), len(uses), sketch.sketch_dim, dtype)
        if key in self._known:
            self._held.spike(self._known[key])
            return _zeros(uses[0].like)
        found, self._known[key] = self._held.over(lambda: self._way.norms(uses, sketch, dtype))
        return found


def _kept_once(kept: Callable[..., tuple[Measured, Kept]], held: Held, known: Known) -> Any:
    def once(uses: Sequence[MatrixFactors], dtype: torch.dtype) -> tuple[Measured, Kept]:
        cost = cost_of(uses)
        key = ("kept", cost, len(uses), dtype)
        if cost.examples_a_call:  # in pieces: they are what is kept
            return kept(uses, dtype)
        if key in known:
            held.spike(known[key])
            like = uses[0].like
            each = cost.gradient_entries // cost.examples
            return _zeros(like), DirectGradients(like.new_empty(cost.examples, each, dtype=dtype))
        found, known[key] = held.over(lambda: kept(uses, dtype))
        return found

    return once


def _zeros(like: Tensor) -> Measured:
    return Measured(*like.new_zeros(4, len(like), dtype=torch.float64))
