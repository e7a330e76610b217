"""The steps of one release, in the one order that is sound: the ranks agree, the ledger's line is
written, the sums of all ranks meet on the owner of each parameter, noise is drawn there, and what
was released goes to all.
"""

from __future__ import annotations

from dataclasses import dataclass

from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.distributed.alike import NOT_KNOWN, shapes_digest
from quietgrad.distributed.shares import Shares
from quietgrad.distributed.team import Team
from quietgrad.ledger import LedgerWriter
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.plan.planned import Planned
from quietgrad.plan.session.noise_session import NoiseSession
from quietgrad.schedules import StepSettings


@dataclass(frozen=True)
class Releases:
    """What makes the releases of a run.

    Attributes:
        plan: what is planned.
        session: roots and state of the noise.
        writer: of the ledger; None without one, and on all ranks but the first.
        team: the processes of the run.
    """

    plan: Planned
    session: NoiseSession
    writer: LedgerWriter | None
    team: Team

    def facts(self, clipped: ClippedSum, release: int, shares: Shares) -> dict[str, str]:
        """What has to be the same on all ranks.

        Raises:
            ValueError: for a sum that the noise's grid is too coarse for.
        """
        self.session.require_fine_grid(clipped, self.plan.at(release).noise_multiplier)
        if self.team.size == 1:
            return {}
        known = clipped.private.least_times  # nothing, of a rank without records
        return {
            "session": f"{self.session.key.seal()} {release}",
            "shares": str(shares.block),
            "records": shares.records,
            "claim": repr(clipped.claim),
            "parameters": shapes_digest(clipped.gradients),
            "drawing": self.session.how(clipped.gradients),
            "precision": repr(sorted(known)) if known else NOT_KNOWN,
        }

    def write_down(self, clipped: ClippedSum, release: int, settings: StepSettings) -> None:
        """Brings the noise to this release, which may draw earlier noise again, and writes the
        ledger's line; only when it is written does any rank go on.
        """

        def write() -> None:
            self.session.join(clipped.gradients, release, own)
            if self.writer is not None:
                self.writer.release(release, settings if self.plan.course else None)

        own = self.team.owned(clipped.gradients)
        self.team.write_down(write)
        if self.team.rank:
            self.session.join(clipped.gradients, release, own)

    def covered(self, clipped: ClippedSum, settings: StepSettings) -> NoisySum:
        """The sum of all ranks with its noise: each parameter's drawn once, by its owner, the
        numbers beside them by the first rank.
        """
        sides = tuple(side.name for side in self.plan.beside)
        entries = sum(g.numel() for g in clipped.gradients.values())
        whole = self.team.summed(clipped, sides)
        first = self.team.rank == 0
        noisy = self.session.cover(whole, settings.noise_multiplier, entries, first)
        return self.team.gathered(noisy, clipped.gradients, sides)
