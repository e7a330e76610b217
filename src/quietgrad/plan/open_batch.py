"""The batch that is open, and whether a clipped sum is one of its."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from quietgrad.checks import SettingsWarning, require_at_least, require_int
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.events import SensitivityClaim


def tell_where_none_is_left(released: int, planned: int, above: int = 3) -> None:
    """To a loop of a process that has made no release of the run: its weights are new ones."""
    if released >= planned:
        warnings.warn(
            f"the ledger has all {planned} releases of the plan, made before this start: this loop "
            "makes no step, and run.epsilon() is that of the run before. Load the weights that it "
            "trained; or train anew with another ledger (for the same records the epsilons add)",
            SettingsWarning,
            stacklevel=above,
        )


def end_of_loop(released: int, planned: int, steps: int | None, looped: bool = True) -> int:
    """The release before which a loop over batches ends.

    Args:
        released, planned: releases.
        steps: of the loop; None takes all that remain.
        looped: whether this process has had a batch of the run.

    Raises:
        TypeError, ValueError: for another number of steps than a whole one.
    """
    if not looped:
        tell_where_none_is_left(released, planned, above=4)
    if steps is None:
        return planned
    require_int("steps", steps)
    require_at_least("steps", steps, 0, "it is how many batches the loop gives at most")
    return min(planned, released + int(steps))


def require_open(batch: OpenBatch | None, released: int, steps: int, closed: bool) -> OpenBatch:
    """The batch that is to be released next.

    Args:
        batch: what ``batches`` gave last.
        released, steps: releases made, and planned.
        closed: whether the run is.

    Raises:
        RuntimeError: if there is none, with the remedy.
    """
    if closed:
        raise RuntimeError("the run is closed; start another one")
    if released >= steps:
        raise RuntimeError(
            f"all {steps} releases of the plan are made; build a plan with more steps"
        )
    if batch is None:
        raise RuntimeError(
            "there is no open batch: every release needs the batch that the run drew for it, or "
            "the sampling rate accounted for is not the one that ran; loop over "
            "run.loader(dataset), or over run.batches() and clip the records at its indices"
        )
    if batch.release != released:
        raise RuntimeError(
            "this batch is released already; every release needs a batch of its own from "
            "batches(), or the sampling rate "
            "accounted for is not the one that ran"
        )
    return batch


@dataclass(frozen=True)
class OpenBatch:
    """The batch that ``batches`` gave and that is not yet released.

    Attributes:
        release: which release it is for.
        examples: how many this process holds of it; private.
        whole: how many it holds on all ranks together; private.
        claim: what is accounted for: the plan's, at the norm of this release.
        name: on the stamps of its sums. A batch that is opened again (its loop was broken off) has
            another: sums of before do not add up with those that come.
    """

    release: int
    examples: int = field(repr=False)
    whole: int = field(repr=False)
    claim: SensitivityClaim
    name: object = field(default_factory=object)

    def require_sum(self, clipped: ClippedSum) -> None:
        """Refuses a sum that is not of this batch, as far as that can be told: its origin, that
        nothing was changed, and how many records it holds.

        Args:
            clipped: what is to be released.

        Raises:
            RuntimeError: with the remedy; no sizes.
            ValueError: if the sum claims another sensitivity.
        """
        if clipped.claim != self.claim:
            raise ValueError(
                f"the clipped sum claims {clipped.claim}, but the plan accounts for {self.claim}"
            )
        stamp = clipped.stamp
        if stamp is None or stamp.batch is not self.name or stamp.release != self.release:
            raise RuntimeError(
                "the clipped sum was not made by this run for the batch that is open; clip the "
                "open batch with run.clip (gradients made otherwise: run.contribution)"
            )
        if not stamp.fits(clipped.summed):
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

    def require_whole(self, examples: int) -> None:
        """Refuses a sum over all ranks that does not hold as many records as the batch.

        Raises:
            RuntimeError: with the remedy; no sizes.
        """
        if examples != self.whole:
            raise RuntimeError(
                "the sums of all ranks together do not hold as many records as the batch, so some "
                "would count twice or never; clip on every rank exactly the records that its "
                "batches() or loader gave"
            )
