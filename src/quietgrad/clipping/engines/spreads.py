"""What one example's plain gradient is a sum of, captured while autograd computes it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quietgrad.clipping.capture.capture import Recording, Use
from quietgrad.clipping.capture.layout import Site
from quietgrad.clipping.capture.row_norms import RowNorms, RowWatch
from quietgrad.clipping.engines.contributions import Unsummed, spreads_of
from quietgrad.clipping.norms.coarseness import refuse_coarser
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.spread import spread_from_norms
from quietgrad.sending import numbers_beside
from quietgrad.tensors import accumulation_dtype, full_precision


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
        row_watch: for the pass; of linear layers it hands over norms.
    """

    rows: int
    single: bool
    projections: Projections
    least_times: float = 1.0
    recording: Recording | None = None
    row_watch: RowWatch = field(init=False, repr=False)
    _found: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _waiting: dict[object, list[tuple[str, RowNorms]]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.row_watch = RowWatch(self.receive_norms)

    def receive_norms(self, site: Site, norms: RowNorms) -> None:
        """One call of a linear layer."""
        for local, name in site.parameters.items():
            if local == "weight":
                self._keep(name, norms)
            else:  # a bias, a sum of the output gradient's rows
                each = norms.of_gradients.sum(1, dtype=torch.float64)
                self._add(name, torch.stack([each, torch.zeros_like(each)]))

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
                each = [norms for _, norms in some]
                norms = torch.stack(
                    [
                        torch.stack([one.of_inputs for one in each]),
                        torch.stack([one.of_gradients for one in each]),
                    ]
                )
                m, b = norms.shape[1:3]
                longest = numbers_beside([one.longest for one in each], norms, torch.float64)
                spread = spread_from_norms(
                    norms.flatten(1, 2), longest.repeat_interleave(b), norms.dtype
                )
                numbers = torch.stack([spread.plain, spread.terms.square()], dim=1).view(m, b, 2)
                for (name, _), found in zip(some, numbers.mT, strict=True):
                    self._add(name, found)
        self._waiting = {}  # the recording holds on to this object
        return self._found

    def _take(self, name: str, spread: Tensor | Unsummed) -> None:
        if isinstance(spread, Tensor):
            self._add(name, spread)
            return
        use = spread.factors
        s, dtype = use.sizes, accumulation_dtype(use.like.dtype)
        self._keep(
            name,
            RowNorms(
                torch.linalg.vector_norm(use.right_bgtd[:, 0], dim=2, dtype=dtype),
                torch.linalg.vector_norm(use.left_bgtp[:, 0], dim=2, dtype=dtype),
                max(s.p, s.d),
            ),
        )

    def _keep(self, name: str, norms: RowNorms) -> None:
        one = norms.of_inputs
        self._waiting.setdefault((one.shape, one.dtype, one.device), []).append((name, norms))

    def _add(self, name: str, spread: Tensor) -> None:
        known = self._found.get(name)
        self._found[name] = spread if known is None else known + spread
