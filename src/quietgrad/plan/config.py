"""What to guarantee and how to train: checked, calibrated and turned into a plan."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from quietgrad.accounting import epsilon_report, noise_multiplier
from quietgrad.beside.adaptive import AdaptiveClipping
from quietgrad.beside.training_loss import TrainingLoss
from quietgrad.beside.values import beside_of, releases_beside, require_alike
from quietgrad.checks import (
    SettingsWarning,
    default_delta,
    require_at_least,
    require_delta_for,
    require_int,
    require_positive,
    require_rate,
    shown,
)
from quietgrad.clipping.settings import Clipping, Performance
from quietgrad.denoising.rules.protocols import GradientRule, require_gradient_rule
from quietgrad.events import PoissonGaussian
from quietgrad.noise.mechanism import GaussianNoise
from quietgrad.noise.methods import IndependentNoise, NoiseMethod
from quietgrad.noise.sources.source import noise_source
from quietgrad.plan.by_step.course import calibrated_scale
from quietgrad.plan.plan import PrivacyPlan
from quietgrad.plan.seeds import Seed, key_of_seed, require_secret_seed
from quietgrad.sampling.assignment import assignment_of
from quietgrad.sampling.parts import index_ids, partition
from quietgrad.sampling.poisson import PoissonSampler
from quietgrad.sampling.users import Users, users_of
from quietgrad.schedules import Course, Phase, Schedules
from quietgrad.schedules.phases import course_of, steps_of


@dataclass(frozen=True)
class PrivacyConfig:
    """What to guarantee and how to train; ``build`` turns it into a plan.

    Attributes:
        target_epsilon: calibrate the noise to this epsilon; give this or ``noise_multiplier``.
        noise_multiplier: sigma, relative to the clipping norm, on the sum of clipped gradients.
        target_delta: default 1 / N^1.1, at most 0.01; 1/N and more is refused, because a mechanism
            that publishes a record would meet it.
        max_grad_norm: C.
        expected_batch_size: B; give this or ``sample_rate``.
        sample_rate: q = B / N.
        steps: T; give this or ``epochs``.
        epochs: T = round(epochs / q), at least 1.
        schedules: factors by step on noise multiplier, clipping norm and batch size; public. The
            target epsilon, where there is one, is that of the whole schedule.
        phases: parts of the run with schedules, and steps or epochs, of their own, in place of
            ``schedules``, ``steps`` and ``epochs``; calibrated together.
        augmentation_multiplicity: K views of a record, averaged before they are clipped: every
            tensor of a batch has the shape [records, K, ...] (``Clipper.views``).
        clipping: how per-example norms are taken: ``quietgrad.clipping.Clipping``.
        noise: ``quietgrad.noise.IndependentNoise``, ``BandedNoise`` or ``MatrixNoise``.
        denoising: what ``PrivateRun.backward`` makes of a released sum before it is written to
            ``.grad``, such as ``quietgrad.denoising.SpikesWithBulk()``; no effect on privacy.
        users: where ``build`` is given ``record_owner``, what stands for a user:
            ``quietgrad.Users(records_per_user=16)``. B, N and q then count users.
        training_loss: a private estimate of it, released beside the gradients of a step:
            ``quietgrad.beside.TrainingLoss``. None releases none.
        adaptive_clipping: lets the clipping norm follow a quantile, from ``max_grad_norm`` on:
            ``quietgrad.beside.AdaptiveClipping``. None keeps it.
        performance: how the machine is used; changes a record's contribution by rounding at most.
        seed: makes sampling, projections and noise reproducible; the guarantee then holds only if
            it stays secret. Where data are private: a string of at least 32 hexadecimal digits
            (``secrets.token_hex(16)``) or a whole number of at least 2^127, drawn at random, that
            starts one run.
        data_are_public: declares that the records need no protection, so that short and repeated
            seeds are allowed. Every epsilon of such a run is marked so.
    """

    target_epsilon: float | None = None
    target_delta: float | None = None
    noise_multiplier: float | None = None
    max_grad_norm: float = 1.0
    expected_batch_size: int | None = None
    sample_rate: float | None = None
    steps: int | None = None
    epochs: float | None = None
    schedules: Schedules = field(default_factory=Schedules)
    phases: Sequence[Phase] = ()
    augmentation_multiplicity: int = 1
    clipping: Clipping = field(default_factory=Clipping)
    noise: NoiseMethod = field(default_factory=IndependentNoise)
    denoising: GradientRule | None = None
    users: Users | None = None
    training_loss: TrainingLoss | None = None
    adaptive_clipping: AdaptiveClipping | None = None
    performance: Performance = field(default_factory=Performance)
    seed: Seed | None = field(default=None, repr=False)
    data_are_public: bool = False

    def build(
        self,
        dataset_size: int,
        record_ids: Sequence[bytes] | None = None,
        record_owner: Iterable[Any] | None = None,
    ) -> PrivacyPlan:
        """Checks everything, calibrates the noise, and returns the plan.

        Args:
            dataset_size: N, records in the training data, treated as public; not with owners.
            record_ids: with more than one band, what identifies each record, a function of that
                record alone (its content): it decides the record's part. None takes its index; the
                guarantee then is for leaving a record's place empty ("zero-out"), and the order of
                the records must stay the same in every session.
            record_owner: one owner a record (text or whole numbers; a list, an array, a column):
                users are then drawn, clipped and accounted for, each with all records. N is the
                number of users. Validation and test records must be other users'.

        Raises:
            ValueError, TypeError: naming the argument, its value and the remedy.
        """
        if hasattr(dataset_size, "__len__") and not isinstance(dataset_size, str):
            raise TypeError(
                f"dataset_size={shown(dataset_size)} is no number; give that of the records, "
                "len(dataset)"
            )
        require_int("dataset_size", dataset_size)
        require_at_least("dataset_size", dataset_size, 1, "there is nothing to train on")
        if not isinstance(self.data_are_public, bool):
            raise TypeError(f"data_are_public={self.data_are_public!r} must be True or False")
        if self.seed is not None:
            key_of_seed(self.seed)
            if not self.data_are_public:
                require_secret_seed(self.seed)
        kinds: dict[str, Any] = {"clipping": Clipping, "noise": NoiseMethod}
        for name, kind in (kinds | {"performance": Performance}).items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(
                    f"{name}={getattr(self, name)!r} is no record; pass one, such as "
                    f"{getattr(PrivacyConfig(), name)!r}"
                )
        require_int("augmentation_multiplicity", self.augmentation_multiplicity)
        beside = beside_of(self.training_loss, self.adaptive_clipping)
        self._require_beside()
        if self.denoising is not None:
            require_gradient_rule("denoising", self.denoising)
        how, owned = users_of(self.users, record_owner, dataset_size, record_ids)
        unit, combined = "records", None
        if how is not None and owned is not None:
            dataset_size, unit, combined = owned.count, "users", how.combined
            record_ids = owned.identities
        q = self._rate(dataset_size, unit)
        clipper = self.clipping.clipper(
            self.max_grad_norm, self.performance, self.augmentation_multiplicity, combined
        )
        clipper = replace(clipper, beside=beside)
        shape, lengths = self._course(q, clipper.max_grad_norm)
        if not shape.varies and self.target_epsilon is not None:
            # A factor on the noise that is the same at all steps is nothing but the scale.
            only = replace(shape.at(0), noise_multiplier=1.0)
            shape = Course(((shape.steps, only),))
        require_alike(beside, shape.varies or bool(self.phases))
        highest = shape.highest_rate
        clipper = clipper.clipping_to(shape.at(0).max_grad_norm)
        delta = self._delta(dataset_size)
        self._require_one("target_epsilon", "noise_multiplier")
        if self.noise_multiplier is not None:
            require_positive("noise_multiplier", self.noise_multiplier)
        else:
            require_positive("target_epsilon", self.target_epsilon)

        def sigma_of(bands: int) -> float:
            if self.noise_multiplier is not None:
                return float(self.noise_multiplier)
            assert self.target_epsilon is not None
            claim = clipper.claim.clipping
            if shape.varies:
                return calibrated_scale(shape, self.target_epsilon, delta, claim, bands)
            return noise_multiplier(
                self.target_epsilon,
                delta,
                sample_rate=highest,
                steps=shape.steps,
                clipping=claim,
                bands=bands,
                beside=partial(releases_beside, beside),
            )

        calibrated = None if self.target_epsilon is None else sigma_of
        mixing, choice = self.noise.correlation(shape.steps, highest, calibrated)
        bands = 1 if mixing is None else mixing.bands
        course = shape.scaled(sigma_of(bands))
        event = course.event(clipper.claim.clipping, bands)
        released = releases_beside(beside, course.least_noise)
        if isinstance(event, PoissonGaussian):  # ``require_alike``: where there are some, it is
            event = replace(event, beside=released)
        if bands * highest > 1:
            warnings.warn(
                f"bands={bands} times the sampling rate {highest:.4g} exceeds 1: every batch is a "
                f"whole part of {dataset_size / bands:.0f} {unit}, fewer than the "
                f"{highest * dataset_size:.0f} asked for; use at most {int(1 / highest)} bands",
                SettingsWarning,
                stacklevel=2,
            )
        parts = None
        if bands > 1:
            ids = index_ids(dataset_size) if record_ids is None else record_ids
            if len(ids) != dataset_size:
                raise ValueError(
                    f"record_ids has {len(ids)} entries for dataset_size={dataset_size}; give one "
                    "a record"
                )
            parts = partition(ids, bands)
        source = noise_source(self.noise.source)
        correlation = None if mixing is None or bands == 1 else mixing.banded
        return PrivacyPlan(
            dataset_size=dataset_size,
            expected_batch_size=event.participation_rate / bands * dataset_size,
            sampler=PoissonSampler(dataset_size, highest, bands, parts, owned),
            clipper=clipper,
            noise=GaussianNoise(
                course.least_noise, correlation, self.noise.memory, source, released
            ),
            event=event,
            delta=delta,
            report=epsilon_report(event, delta),
            mixing=mixing,
            band_choice=choice,
            record_identity="index" if record_ids is None else "content",
            assignment=assignment_of(record_ids, owned, bands),
            target_epsilon=self.target_epsilon,
            denoising=self.denoising,
            training_loss=self.training_loss,
            adaptive_clipping=self.adaptive_clipping,
            seed=self.seed,
            data_are_public=self.data_are_public,
            course=course if course.varies else None,
            phase_lengths=lengths,
        )

    def _require_beside(self) -> None:
        kinds = {"training_loss": TrainingLoss, "adaptive_clipping": AdaptiveClipping}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TypeError(
                    f"{name}={value!r} must be a quietgrad.beside.{kind.__name__}, such as "
                    f"{kind()!r}, or None"
                )
        if self.adaptive_clipping is not None and self.clipping.scaling == "automatic":
            raise ValueError(
                "adaptive_clipping with clipping.scaling='automatic', which brings every gradient "
                "to the clipping norm, so that the norm is a learning rate and no quantile of it "
                "means anything; use scaling='clip'"
            )

    def _course(self, q: float, max_grad_norm: float) -> tuple[Course, tuple[int, ...]]:
        """Settings of every step at noise multiplier 1, and the steps of each phase."""
        if not isinstance(self.schedules, Schedules):
            raise TypeError(
                f"schedules={self.schedules!r} is no record; pass quietgrad.schedules.Schedules"
            )
        if not self.phases:
            size = self.schedules.batch_size
            steps = steps_of(self.steps, self.epochs, q, size, "")
            parts: list[tuple[int, Schedules, str]] = [(steps, self.schedules, "schedules")]
        else:
            self._require_phases()
            parts = []
            for i, phase in enumerate(self.phases):
                name = f"phases[{i}]"
                parts.append((phase.steps_at(q, f"{name}."), phase, name))
        return course_of(parts, q, max_grad_norm), tuple(count for count, _, _ in parts)

    def _require_phases(self) -> None:
        if isinstance(self.phases, Phase):
            raise TypeError(f"phases={self.phases!r} is a single one; pass a list, [Phase(...)]")
        other = next((phase for phase in self.phases if not isinstance(phase, Phase)), None)
        if other is not None:
            raise TypeError(f"phases holds {other!r}; pass quietgrad.schedules.Phase records")
        for name, value in (("steps", self.steps), ("epochs", self.epochs)):
            if value is not None:
                raise ValueError(
                    f"{name}={value!r} with phases: each phase says its own; leave {name} out"
                )
        if self.schedules != Schedules():
            raise ValueError(
                f"schedules={self.schedules!r} with phases: a phase has its own; leave schedules "
                "out"
            )

    def _require_one(self, one: str, other: str) -> None:
        first, second = getattr(self, one), getattr(self, other)
        if (first is None) == (second is None):
            raise ValueError(
                f"{one}={first!r} and {other}={second!r}: give exactly one of {one} and {other}"
            )

    def _rate(self, dataset_size: int, unit: str) -> float:
        self._require_one("expected_batch_size", "sample_rate")
        if self.sample_rate is not None:
            require_rate("sample_rate", self.sample_rate)
            return float(self.sample_rate)
        assert self.expected_batch_size is not None
        require_positive("expected_batch_size", self.expected_batch_size)
        if self.expected_batch_size > dataset_size:
            raise ValueError(
                f"expected_batch_size={self.expected_batch_size} exceeds the number of {unit}, "
                f"{dataset_size}; use at most {dataset_size}"
            )
        return float(self.expected_batch_size) / dataset_size

    def _delta(self, dataset_size: int) -> float:
        if self.target_delta is None:
            return default_delta(dataset_size)
        require_delta_for("target_delta", self.target_delta, dataset_size)
        return float(self.target_delta)
