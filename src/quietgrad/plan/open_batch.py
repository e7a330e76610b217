"""The batch that is open, and whether a clipped sum is one of its."""

from __future__ import annotations

from dataclasses import dataclass, field

from quietgrad.clipping.clipped_sum import ClippedSum


@dataclass(frozen=True)
class OpenBatch:
    """The batch that ``batches`` gave and that is not yet released.

    Attributes:
        release: which release it is for.
        examples: how many it holds; private.
        name: on the stamps of its sums. A batch that is opened again (its loop was broken off) has
            another: sums of before do not add up with those that come.
    """

    release: int
    examples: int
    name: object = field(default_factory=object)

    def require_sum(self, clipped: ClippedSum) -> None:
        """Refuses a sum that is not of this batch, as far as that can be told: its origin, that
        nothing was changed, and how many records it holds.

        Args:
            clipped: what is to be released.

        Raises:
            RuntimeError: with the remedy; no sizes.
        """
        stamp = clipped.stamp
        if stamp is None or stamp.run is not self.name or stamp.release != self.release:
            raise RuntimeError(
                "the clipped sum was not made by this run for the batch that is open; clip the "
                "open batch with run.clip (gradients made otherwise: run.contribution)"
            )
        if not stamp.fits(clipped.gradients):
            raise RuntimeError(
                "the clipped sum was changed after it was clipped, so its bound is gone; release "
                "it as run.clip and + made it"
            )
        # The message names no sizes: how many records a batch holds is private.
        if clipped.private.examples != self.examples:
            raise RuntimeError(
                "the clipped sum does not hold as many records as the open batch; clip exactly the "
                "records at the indices that batches() gave, each once (several views of a record "
                "are no records: average their losses)"
            )
