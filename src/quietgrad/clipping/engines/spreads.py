"""What one example's plain gradient is a sum of, captured while autograd computes it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quietgrad.clipping.capture.capture import Recording, Use
from quietgrad.clipping.engines.contributions import spreads_of
from quietgrad.clipping.norms.coarseness import refuse_coarser
from quietgrad.clipping.norms.estimators.projections import Projections


@dataclass
class Spreads:
    """Parameter name -> spreads of one example's gradient, added up over calls. Private.

    Attributes:
        rows: of the example.
        projections: of the release, for the signs of modules without a rule.
        least_times: what least divisors are multiplied by.
        recording: set once the losses are there.
        found: parameter name -> [2, rows] float64 (``spreads_of``).
    """

    rows: int
    projections: Projections
    least_times: float = 1.0
    recording: Recording | None = None
    found: dict[str, Tensor] = field(default_factory=dict)

    def receive(self, use: Use) -> None:
        """One call; nothing of one that cannot be told apart, or whose module draws numbers or does
        not run again.
        """
        assert self.recording is not None
        refuse_coarser(use.site.name, use.tensors, self.least_times)
        try:
            with torch.no_grad():
                spreads = spreads_of(use, self.rows, self.recording, self.projections)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            if "allocate" in str(error):  # torch's words for a processor's memory
                raise
            return  # plain autograd needs nothing of this
        for name, spread in spreads.items():
            known = self.found.get(name)
            self.found[name] = spread if known is None else known + spread
