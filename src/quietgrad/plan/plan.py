"""Sampler, clipper, noise and accountant that belong together."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import nn

from quietgrad.accounting import noise_multiplier
from quietgrad.accounting.spending import EpsilonReport
from quietgrad.beside.adaptive import AdaptiveClipping
from quietgrad.beside.training_loss import TrainingLoss
from quietgrad.beside.values import SideMethod, beside_of, releases_beside
from quietgrad.clipping.clipper import Clipper
from quietgrad.denoising.rules.protocols import GradientRule
from quietgrad.distributed.team import Team
from quietgrad.events import ADD_REMOVE, ADD_REMOVE_USER, ZERO_OUT, ClippingClaim, PrivacyEvent
from quietgrad.ledger import LedgerContents
from quietgrad.noise.correlation.bands import BandChoice
from quietgrad.noise.correlation.mixing import MixingMatrix
from quietgrad.noise.mechanism import GaussianNoise
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.plan.by_step.course import (
    StepByStep,
    calibrated_scale,
    require_course,
    require_same,
)
from quietgrad.plan.run import PrivateRun
from quietgrad.plan.seeds import Seed
from quietgrad.plan.starting import start_run
from quietgrad.sampling.assignment import Assignment
from quietgrad.sampling.poisson import PoissonSampler
from quietgrad.schedules import Course

# Rules that take every matrix by itself.
MATRIX_BY_MATRIX = "quietgrad.denoising.rules."


@dataclass(frozen=True)
class PrivacyPlan(StepByStep):
    """Sampler, clipper, noise and event that belong together. Frozen; ``start`` runs it.

    Attributes:
        dataset_size: N; users, where ``record_owner`` was given.
        expected_batch_size: B = q N, the divisor of every released sum; N / b where b q exceeds 1.
        sampler, clipper, noise: the mechanism that runs.
        event: the mechanism that is accounted for, all steps.
        delta: target delta.
        report: epsilon at that delta, with the discretisation used.
        mixing: the mixing matrix of correlated noise, and what is known of it.
        band_choice: how the number of bands was chosen, where it was.
        record_identity: with more than one band, what decides a record's part: "content"
            (``record_ids`` were given) or "index".
        assignment: digests of the identities or owners that were given. Private.
        target_epsilon: what the noise was calibrated for; None where a noise multiplier was given.
        denoising: what is done to a released sum before it is written to ``.grad``.
        training_loss, adaptive_clipping: what is released beside the gradients; None for neither.
        course: the settings of every step, where they change (``quietgrad.schedules``). The
            sampler's rate and ``expected_batch_size`` are then the highest, ``noise_multiplier`` is
            the least, and the clipper's norm the first. None: all steps are alike.
        phase_lengths: steps of each phase; one phase where none were given.
        extensions: what was planned on top by ``extended``: settings, and a new target if any.
        seed: secret unless the data are public; None draws from the operating system.
        data_are_public: whether the records were declared to need no protection.
    """

    dataset_size: int
    expected_batch_size: float
    sampler: PoissonSampler
    clipper: Clipper
    noise: GaussianNoise
    event: PrivacyEvent
    delta: float
    report: EpsilonReport
    mixing: MixingMatrix | None = field(default=None, repr=False)
    band_choice: BandChoice | None = field(default=None, repr=False)
    record_identity: str = "index"
    assignment: Assignment = field(default=Assignment(), repr=False)
    target_epsilon: float | None = None
    denoising: GradientRule | None = None
    training_loss: TrainingLoss | None = None
    adaptive_clipping: AdaptiveClipping | None = None
    seed: Seed | None = field(default=None, repr=False)
    data_are_public: bool = False
    course: Course | None = None
    phase_lengths: tuple[int, ...] = ()
    extensions: tuple[tuple[Course, float | None], ...] = ()

    def __post_init__(self) -> None:
        # The mechanism that runs is the one accounted for; these can only fail if the plan was put
        # together by hand.
        require_course(self.course, self.event, self.sampler, self.max_grad_norm)
        whole = self.whole_course
        if (
            self.sampler.sample_rate != whole.highest_rate
            or self.sampler.dataset_size != self.dataset_size
        ):
            raise ValueError(
                "the sampler's rate or data set size is not the accounted one; build plans with "
                "PrivacyConfig.build"
            )
        if (self.sampler.users is None) != (self.clipper.combined is None):
            raise ValueError(
                "users are drawn and records are clipped, or the other way round; build plans with "
                "PrivacyConfig.build"
            )
        if self.noise.noise_multiplier != whole.least_noise:
            raise ValueError(
                "the noise multiplier that would run is not the accounted one; build plans with "
                "PrivacyConfig.build"
            )
        if not (
            self.noise.beside == self.event.beside
            and self.clipper.beside == self.beside
            and self.event.beside == releases_beside(self.beside, self.noise_multiplier)
        ):
            raise ValueError(
                "what would be released beside the gradients is not what is accounted for; build "
                "plans with PrivacyConfig.build"
            )
        if not self.event.bands == self.noise.bands == self.sampler.bands:
            raise ValueError(
                f"bands={self.event.bands} is accounted for, but the noise that would run has "
                f"{self.noise.bands} and the sampler {self.sampler.bands}; "
                "build plans with PrivacyConfig.build"
            )
        mixing = self.noise.mixing
        if mixing is not None and mixing.steps < self.steps:
            raise ValueError(
                f"the mixing matrix has {mixing.steps} rows for {self.steps} steps; "
                "build plans with PrivacyConfig.build"
            )
        if self.clipper.claim.clipping != self.event.clipping:
            raise ValueError(
                f"the clipper claims {self.clipper.claim.clipping}, but {self.event.clipping} was "
                "accounted for; "
                "build plans with PrivacyConfig.build"
            )
        if self.report.event != self.event or self.report.delta != self.delta:
            raise ValueError(
                "the epsilon was computed for another event or delta; build plans with "
                "PrivacyConfig.build"
            )

    @property
    def beside(self) -> tuple[SideMethod, ...]:
        """What is released beside the gradients of a step."""
        return beside_of(self.training_loss, self.adaptive_clipping)

    def told_beside(self) -> dict[str, object]:
        """The same as a fact to write down; empty where nothing is."""
        told = [side.to_json() for side in self.event.beside]
        return {"beside": told} if told else {}

    def told_users(self) -> dict[str, object]:
        """What stands for a user, as facts to write down; empty where records are protected."""
        users = self.sampler.users
        if users is None:
            return {}
        return {
            "records_per_user": users.at_most,
            "combined": self.clipper.combined,
            "choice": users.choice,
        }

    @property
    def noise_multiplier(self) -> float:
        return self.noise.noise_multiplier

    @property
    def max_grad_norm(self) -> float:
        """C; the first, where it adapts (``PrivateRun.max_grad_norm`` is the current one)."""
        return self.clipper.max_grad_norm

    @property
    def epsilon(self) -> float:
        """Epsilon of the whole plan at ``delta``."""
        return self.report.epsilon

    def multiplier_for(
        self,
        *,
        clipping: ClippingClaim | None = None,
        bands: int | None = None,
    ) -> float | None:
        """The noise multiplier that the target would need otherwise; None without a target.

        Args:
            clipping: what the clipper would claim (None: what it does).
            bands: b (None: the plan's).

        Returns:
            sigma, relative to C. Cost: one search of the accountant.
        """
        if self.target_epsilon is None:
            return None
        claim = self.event.clipping if clipping is None else clipping
        b = self.event.bands if bands is None else bands
        if self.course is not None:
            scale = calibrated_scale(self.course, self.target_epsilon, self.delta, claim, b)
            return scale * self.noise_multiplier
        return noise_multiplier(
            self.target_epsilon,
            self.delta,
            sample_rate=self.sampler.sample_rate,
            steps=self.steps,
            clipping=claim,
            bands=b,
            beside=partial(releases_beside, self.beside),
        )

    def write_gradients(self, noisy: NoisySum, model: nn.Module, team: Team | None = None) -> None:
        """Post-processes what was released, and sets ``.grad`` of the model to the mean.

        Args:
            noisy: as it was released. A denoiser of the optimiser's moment is the optimiser's: it
                needs all releases, and steps on ``noisy`` itself.
            model: the one that was clipped.
            team: of the run, whose ranks denoise a part of the layers each.

        Raises:
            ValueError: if it was denoised before, or the model lacks one of the parameters.
        """
        rule = self.denoising
        if rule is not None:
            # A rule of somebody else's may look at all layers together.
            if team is not None and type(rule).__module__.startswith(MATRIX_BY_MATRIX):
                noisy = team.denoised(rule.denoise, noisy, model)
            else:
                noisy.require_whole(type(rule).__name__)
                noisy = rule.denoise(noisy, model)
        noisy.write_gradients(model)

    def start(
        self,
        ledger: str | Path | None = None,
        keys: str | Path | None = None,
        resume: bool | None = None,
        tensor_parallel: int = 1,
    ) -> PrivateRun:
        """Begins to run the plan, or goes on with it if the ledger already holds releases of the
        same mechanism.

        Under an initialised process group of several ranks all of them start one run, with the
        same plan; the first alone writes ``ledger`` and ``keys`` (docs/many_processes.md).

        Every start draws with a root of its own, so that none draws another's noise again
        (``quietgrad.plan.session.starts``); with a seed and data that were declared public the
        seed alone fixes all draws.

        Correlated noise goes on exactly where its earlier draws can be made again: with the same
        seed, or ``keys``, and the same matrix. Otherwise it begins anew (a new block): as private,
        a little less well correlated. So it does, with a warning at the first release, where the
        dtype of the gradients, the device or the library that draws is another than before.

        Args:
            ledger: file to record every release in before it is made; its count file lies beside
                it. None keeps count in memory only.
            keys: file for what has to stay secret: the roots of correlated noise without a seed, or
                the seed. Remove it when the run has ended, and never publish it.
            resume: True goes on with a ledger and never creates one; False begins one and never
                goes on; None does what fits.
            tensor_parallel: how many neighbouring ranks hold every record together, each with a
                part of every layer (``parallelize_module``): a divisor of the number of ranks
                (docs/tensor_parallel.md).

        Raises:
            ValueError: if the ledger was written by a different mechanism, is in use, damaged,
                shortened or gone, or the seed has started another run; for an extended plan,
                without the ledger of the run that it extends.
            RuntimeError: in one of several processes that are not in one process group; and on all
                ranks of a group, where they differ or another one cannot start.
        """
        return start_run(self, ledger, keys, resume, tensor_parallel)

    @property
    def neighbouring(self) -> str:
        """The relation that epsilon is about. Parts partitioned by index move when a record is
        taken out, so its place has to stay, empty.
        """
        if self.sampler.users is not None:
            return ADD_REMOVE_USER
        return (
            ZERO_OUT if self.sampler.bands > 1 and self.record_identity == "index" else ADD_REMOVE
        )

    def sampling_facts(self) -> dict[str, object]:
        """What the ledger's first line says of the sampling."""
        cyclic = self.sampler.bands > 1
        facts: dict[str, object] = {
            "sampler": "cyclic-poisson" if cyclic else "poisson",
            "neighbouring": self.neighbouring,
            "data_declared_public": self.data_are_public,
            "noise_source": self.noise.source.name,
        }
        facts |= self.told_users()
        return facts | ({"record_identity": self.record_identity} if cyclic else {})

    def require_same_mechanism(self, contents: LedgerContents) -> None:
        """Raises ValueError where a ledger is of another mechanism."""
        course = self.first_planned
        planned: dict[str, object] = {
            "dataset_size": self.dataset_size,  # the event's rate and noise follow from it
            "event": self.first_event.to_json(),
            "max_grad_norm": self.max_grad_norm,
            "planned_steps": course.steps,
            "delta": self.delta,
            **self.sampling_facts(),
            "course": course.to_json() if course.varies else None,
        }
        require_same(contents, planned, [more for more, _ in self.extensions])
