"""Sampler, clipper, noise and accountant that belong together."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quietgrad.accounting.spending import EpsilonReport
from quietgrad.clipping.engine import Clipper
from quietgrad.facts import PoissonGaussian
from quietgrad.keyring import KeyRing, Session, read_ring, write_ring
from quietgrad.ledger import LedgerContents, LedgerWriter, read_ledger
from quietgrad.noise.bands import BandChoice
from quietgrad.noise.correlated import BandedNoise
from quietgrad.noise.gaussian import GaussianNoise
from quietgrad.noise.mixing import MixingMatrix
from quietgrad.plan.run import PrivateRun
from quietgrad.randomness import RandomKey
from quietgrad.sampling.cyclic import CyclicPoissonSampler
from quietgrad.sampling.poisson import PoissonSampler

if TYPE_CHECKING:
    from quietgrad.plan.config import PrivacyConfig

NEIGHBOURING = "add-remove"
SEEDED = "seed"  # the session of a run whose seed draws all steps; one seed a run (docs/privacy.md)


@dataclass(frozen=True)
class PrivacyPlan:
    """Sampler, clipper, noise and event that belong together. Frozen; ``start`` runs it.

    Attributes:
        config: what it was built from.
        dataset_size: N.
        expected_batch_size: B = q N, the divisor of every released sum; N / b where b q exceeds 1.
        sampler, clipper, noise: the mechanism that runs.
        event: the mechanism that is accounted for, all steps.
        delta: target delta.
        report: epsilon at that delta, with the discretisation used.
        mixing: the mixing matrix of correlated noise, and what is known of it.
        band_choice: how the number of bands was chosen, where it was.
        record_identity: with more than one band, what decides a record's part: "content" (``record_ids`` were given) or "index".
    """

    config: PrivacyConfig
    dataset_size: int
    expected_batch_size: float
    sampler: PoissonSampler | CyclicPoissonSampler
    clipper: Clipper
    noise: GaussianNoise | BandedNoise
    event: PoissonGaussian
    delta: float
    report: EpsilonReport
    mixing: MixingMatrix | None = None
    band_choice: BandChoice | None = None
    record_identity: str = "index"

    def __post_init__(self) -> None:
        # The mechanism that runs is the one accounted for; these can only fail if the plan was put together by hand.
        if self.sampler.sample_rate != self.event.sample_rate or self.sampler.dataset_size != self.dataset_size:
            raise ValueError(
                "the sampler's rate or data set size is not the accounted one; build plans with PrivacyConfig.build"
            )
        if self.noise.noise_multiplier != self.event.noise_multiplier:
            raise ValueError(
                "the noise multiplier that would run is not the accounted one; build plans with PrivacyConfig.build"
            )
        running = self.noise.bands if isinstance(self.noise, BandedNoise) else 1
        dealt = self.sampler.bands if isinstance(self.sampler, CyclicPoissonSampler) else 1
        if not self.event.bands == running == dealt:
            raise ValueError(
                f"bands={self.event.bands} is accounted for, but the noise that would run has {running} and the sampler {dealt}; "
                "build plans with PrivacyConfig.build"
            )
        if isinstance(self.noise, BandedNoise) and self.noise.mixing.steps < self.event.steps:
            raise ValueError(
                f"the mixing matrix has {self.noise.mixing.steps} rows for {self.event.steps} steps; build plans with PrivacyConfig.build"
            )
        if self.clipper.claim.clipping != self.event.clipping:
            raise ValueError(
                f"the clipper claims {self.clipper.claim.clipping}, but {self.event.clipping} was accounted for; "
                "build plans with PrivacyConfig.build"
            )
        if self.report.event != self.event or self.report.delta != self.delta:
            raise ValueError(
                "the epsilon was computed for another event or delta; build plans with PrivacyConfig.build"
            )

    @property
    def noise_multiplier(self) -> float:
        return self.noise.noise_multiplier

    @property
    def steps(self) -> int:
        return self.event.steps

    @property
    def epsilon(self) -> float:
        """Epsilon of the whole plan at ``delta``."""
        return self.report.epsilon

    def start(self, ledger: str | Path | None = None, keys: str | Path | None = None) -> PrivateRun:
        """Begins to run the plan, or goes on with it if the ledger already holds releases of the same mechanism.

        Correlated noise goes on exactly where its earlier draws can be made again: with the same seed, or ``keys``, and the same matrix. Otherwise it begins anew (a new
        block): as private, a little less well correlated. So it does, with a warning at the first release, where the dtype of the gradients, the device or the library that draws is
        another than before. Nothing here knows another seed: keep it between the sessions of a run. With another the numbers are others, which is as private, but not correlated
        across the stop, and ``NoisySum.mixing_row`` does not say so.

        Args:
            ledger: file to record every release in before it is made; None keeps count in memory only.
            keys: file for the secret roots of correlated noise without a seed, one a session; remove it when the run has ended, and never publish it.

        Raises:
            ValueError: if the ledger was written by a different mechanism, or is in use.
        """
        key = RandomKey.from_entropy() if self.config.seed is None else RandomKey.from_seed(self.config.seed)
        if ledger is None:
            return PrivateRun(self, KeyRing((Session(0, SEEDED, key),)), None, 0)
        writer = LedgerWriter(ledger)  # locked before it is read: nobody else can add releases in between
        try:
            contents = read_ledger(ledger)
            if contents.header:
                self._require_same_mechanism(contents.header)
            else:
                writer.mechanism(
                    self.event,
                    planned_steps=self.steps,
                    delta=self.delta,
                    dataset_size=self.dataset_size,
                    max_grad_norm=self.config.max_grad_norm,
                    **self._sampling_facts(),
                    **self._part_sizes(),
                )
            ring, block, drawn = self._begin_session(writer, contents, key, None if keys is None else Path(keys))
        except BaseException:
            writer.close()
            raise
        return PrivateRun(self, ring, writer, contents.releases, block, drawn, contents.not_private is not None)

    @property
    def neighbouring(self) -> str:
        """The relation that epsilon is about. Parts dealt by index move when a record is taken out, so its place has to stay, empty."""
        cyclic = isinstance(self.sampler, CyclicPoissonSampler)
        return "zero-out" if cyclic and self.record_identity == "index" else NEIGHBOURING

    def _sampling_facts(self) -> dict[str, object]:
        cyclic = isinstance(self.sampler, CyclicPoissonSampler)
        facts: dict[str, object] = {
            "sampler": "cyclic-poisson" if cyclic else "poisson",
            "neighbouring": self.neighbouring,
        }
        return facts | ({"record_identity": self.record_identity} if cyclic else {})

    def _part_sizes(self) -> dict[str, list[int]]:
        """[b], where they follow from N and b alone. Dealt by content they say more of a record than that it is there, and are kept nowhere."""
        if not isinstance(self.sampler, CyclicPoissonSampler) or self.record_identity != "index":
            return {}
        return {"part_sizes": np.bincount(self.sampler.parts, minlength=self.sampler.bands).tolist()}

    def _begin_session(
        self, writer: LedgerWriter, contents: LedgerContents, key: RandomKey, keys: Path | None
    ) -> tuple[KeyRing, int, str | None]:
        """Roots by step, the first step of the block that goes on or begins here, and how its noise was drawn so far.

        A seed draws all steps; else this session draws with a fresh root, and older ones only make earlier noise again.
        """
        step = contents.releases
        seeded = self.config.seed is not None
        session = Session(0, SEEDED, key) if seeded else Session(step, secrets.token_hex(8), key)
        if not isinstance(self.noise, BandedNoise):
            return KeyRing((session,)), 0, None
        # Roots that a ledger without releases knows nothing of are another run's.
        earlier = KeyRing(()) if keys is None or not step or seeded else read_ring(keys)
        known = KeyRing((session,)) if seeded else earlier
        begun, digest = contents.noise_block, self.noise.digest
        goes_on = begun is not None and begun[1] == digest and known.covers(contents.noise_sessions)
        ring = (known if goes_on else KeyRing(())).with_session(session)
        if keys is not None and not seeded:
            write_ring(ring, keys)
        if not goes_on:
            writer.noise_block(step, digest)
        if not (goes_on and seeded):
            writer.noise_session(session.step, session.name)
        return (ring, begun[0], contents.noise_drawn) if goes_on and begun is not None else (ring, step, None)

    def _require_same_mechanism(self, header: dict[str, object]) -> None:
        planned = {
            "event": replace(self.event, steps=self.event.bands).to_json(),
            "dataset_size": self.dataset_size,
            "max_grad_norm": self.config.max_grad_norm,
            "planned_steps": self.steps,
            "delta": self.delta,
            **self._sampling_facts(),
        }
        for name, value in planned.items():
            if header.get(name) != value:
                raise ValueError(
                    f"resume with a changed privacy setting: {name} was {header.get(name)!r} and is now {value!r}; "
                    "resume with the settings of the first start, or begin a new run directory (its epsilon adds to this one's)"
                )
