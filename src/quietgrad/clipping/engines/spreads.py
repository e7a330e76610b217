"""What one example's plain gradient is a sum of, captured while autograd computes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from quietgrad.clipping.capture.capture import Recording, Use
from quietgrad.clipping.engines.contributions import Unsummed, spreads_of
from quietgrad.clipping.norms.coarseness import refuse_coarser
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.factors import DenseFactors
from quietgrad.clipping.norms.factors.rows import is_same
from quietgrad.clipping.norms.spread import spread_from_norms
from quietgrad.sending import numbers_beside
from quietgrad.tensors import accumulation_dtype, full_precision


class _RowNorms(NamedTuple):
    """Of a parameter's factors, [2, rows, t] as they come; ``longest``: entries of a row."""

    name: str
    norms: Tensor
    longest: int


class _Before(NamedTuple):
    """A factor whose norms are known: queries, keys and values have one input."""

    factor: Tensor
    version: int
    norms: Tensor


@dataclass
class Spreads:
    """Parameter name -> spreads of one example's gradient, added up over calls. Private.

    Those of matrices are sums over positions of a few numbers: they are made for all matrices
    together, once the backward pass is over.

    Attributes:
        rows: of the example.
        single: whether examples of the run have one row each (``RowGroups``).
        projections: of the release, for the signs of modules without a rule.
        least_times: what least divisors are multiplied by.
        recording: set once the losses are there.
    """

    rows: int
    single: bool
    projections: Projections
    least_times: float = 1.0
    recording: Recording | None = None
    _found: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _waiting: dict[object, list[_RowNorms]] = field(default_factory=dict, repr=False)
    _before: _Before | None = field(default=None, repr=False)

    def receive(self, use: Use) -> None:
        """One call; nothing of one that cannot be told apart, or whose module draws numbers or does
        not run again.
        """
        assert self.recording is not None
        refuse_coarser(use.site.name, use.tensors, self.least_times)
        try:
            with torch.no_grad():
                spreads = spreads_of(use, self.rows, self.recording, self.projections, self.single)
                for name, spread in spreads:
                    self._take(name, spread)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            if "allocate" in str(error):  # torch's words for a processor's memory
                raise
            # Plain autograd needs nothing of this.

    def found(self) -> dict[str, Tensor]:
        """Parameter name -> [2, rows] float64 (``spreads_of``), once all calls have come."""
        with torch.no_grad(), full_precision():
            for some in self._waiting.values():
                norms = torch.stack([one.norms for one in some], dim=1)
                m, b = norms.shape[1:3]
                each = numbers_beside([one.longest for one in some], norms, torch.float64)
                spread = spread_from_norms(
                    norms.flatten(1, 2), each.repeat_interleave(b), norms.dtype
                )
                numbers = torch.stack([spread.plain, spread.terms.square()], dim=1).view(m, b, 2)
                for one, found in zip(some, numbers.mT, strict=True):
                    self._add(one.name, found)
        # The recording holds on to this object: no activation may outlive the pass with it.
        self._waiting, self._before = {}, None
        return self._found

    def _take(self, name: str, spread: Tensor | Unsummed) -> None:
        if isinstance(spread, Tensor):
            self._add(name, spread)
            return
        norms = self._norms_of(spread.factors)
        s = spread.factors.sizes
        waiting = self._waiting.setdefault((norms.shape, norms.dtype, norms.device), [])
        waiting.append(_RowNorms(name, norms, max(s.p, s.d)))

    def _norms_of(self, use: DenseFactors) -> Tensor:
        """[2, rows, t] of inputs and output gradients."""
        s, dtype = use.sizes, accumulation_dtype(use.like.dtype)
        right, before = use.right_bgtd, self._before
        found = right.new_empty(2, s.b, s.t, dtype=dtype)
        if before is not None and is_same(before.factor, before.version, right):
            found[0].copy_(before.norms)
        else:
            torch.linalg.vector_norm(right[:, 0], dim=2, dtype=dtype, out=found[0])
        torch.linalg.vector_norm(use.left_bgtp[:, 0], dim=2, dtype=dtype, out=found[1])
        self._before = _Before(right, right._version, found[0])
        return found

    def _add(self, name: str, spread: Tensor) -> None:
        known = self._found.get(name)
        self._found[name] = spread if known is None else known + spread
