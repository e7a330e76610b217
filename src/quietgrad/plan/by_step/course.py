"""Plans whose settings change: calibrated as a whole, and extended."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from quietgrad.accounting import EpsilonReport, epsilon_report
from quietgrad.accounting.calibrate import calibrate_by_groups
from quietgrad.accounting.rounding import round_up_to
from quietgrad.beside.values import SideMethod, releases_beside, require_alike
from quietgrad.checks import as_plain, require_positive
from quietgrad.clipping.clipper import Clipper
from quietgrad.events import ClippingClaim, EventSequence, PoissonGaussian, PrivacyEvent
from quietgrad.ledger import LedgerContents, holds_records
from quietgrad.noise.correlation.banded import BandedLower, inside
from quietgrad.noise.mechanism import GaussianNoise
from quietgrad.plan.by_step.changed import ChangedSettings, changes
from quietgrad.randomness import RandomKey
from quietgrad.sampling.poisson import PoissonSampler
from quietgrad.sampling.users import UserIndices
from quietgrad.schedules import Course, StepSettings
from quietgrad.schedules.phases import steps_of

BUILD = "build plans with PrivacyConfig.build"


Plan = TypeVar("Plan", bound="StepByStep")


class StepByStep:
    """What of a plan depends on the step. All of it is public but ``indices``."""

    dataset_size: int
    sampler: PoissonSampler
    clipper: Clipper
    event: PrivacyEvent
    course: Course | None
    phase_lengths: tuple[int, ...]
    extensions: tuple[tuple[Course, float | None], ...]
    noise: GaussianNoise
    delta: float
    target_epsilon: float | None

    @property
    def beside(self) -> tuple[SideMethod, ...]:
        """What is released beside the gradients of a step."""
        raise NotImplementedError

    @property
    def steps(self) -> int:
        """T."""
        return self.event.steps if self.course is None else self.course.steps

    @property
    def whole_course(self) -> Course:
        """The settings of every step, also where they are all alike."""
        if self.course is not None:
            return self.course
        assert isinstance(self.event, PoissonGaussian)  # ``require_course``
        sigma, rate = self.event.noise_multiplier, self.event.sample_rate
        return Course(((self.event.steps, StepSettings(sigma, rate, self.clipper.max_grad_norm)),))

    @property
    def plain_event(self) -> PoissonGaussian:
        """The event of a plan whose steps are all alike.

        Raises:
            ValueError: for any other: audits attack one setting.
        """
        if self.course is not None or not isinstance(self.event, PoissonGaussian):
            raise ValueError(
                "an audit attacks a plan whose steps are all alike, and the settings of this one "
                "change; audit it without schedules and phases (at its least noise_multiplier, "
                f"{self.whole_course.least_noise:.4g}, it is no harder to attack)"
            )
        return self.event

    @property
    def audited_event(self) -> PrivacyEvent:
        """The event of a plan that canaries can be looked for in, step by step.

        Raises:
            ValueError: for correlated noise whose settings change, which is not taken apart there.
        """
        if self.course is not None and self.event.bands > 1:
            raise ValueError(
                f"the settings of this plan change, and its noise is correlated over "
                f"{self.event.bands} bands; audit it with independent noise, or without schedules "
                "and phases"
            )
        return self.event

    def at(self, step: int) -> StepSettings:
        """What release ``step``, from 0, is made with."""
        return self.whole_course.at(step)

    def clipper_at(self, step: int) -> Clipper:
        """What clips the batch of release ``step``."""
        return self.clipper.clipping_to(self.at(step).max_grad_norm)

    def indices(self, key: RandomKey, step: int) -> NDArray[np.int64] | UserIndices:
        """The batch of release ``step`` (``PoissonSampler.batch``). Private."""
        return self.sampler.at(self.at(step).sample_rate).batch(key, step)

    def batch_size_at(self, settings: StepSettings) -> float:
        """B of a step, which its sum is divided by."""
        rate = min(1.0, self.sampler.bands * settings.sample_rate)
        return rate / self.sampler.bands * self.dataset_size

    def phase_at(self, step: int) -> tuple[int, int]:
        """The phase of release ``step``, and how many steps of it remain from there on."""
        ends = list(itertools.accumulate(self.phase_lengths or (self.steps,)))
        phase = bisect.bisect_right(ends, step)
        return phase, ends[phase] - step

    @property
    def first_planned(self) -> Course:
        """The settings of every step, without extensions."""
        return self.whole_course.first(self.steps - sum(more.steps for more, _ in self.extensions))

    @property
    def first_event(self) -> PoissonGaussian:
        """The mechanism of one step, of b steps with b bands: the first."""
        first, bands = self.at(0), self.event.bands
        sigma, rate = first.noise_multiplier, first.sample_rate
        beside = self.event.beside
        return PoissonGaussian(sigma, rate, bands, self.event.clipping, bands, beside)

    def extended(
        self: Plan,
        *,
        steps: int | None = None,
        epochs: float | None = None,
        target_epsilon: float | None = None,
    ) -> Plan:
        """This plan with more steps after its last, at that one's settings: a phase of its own.
        ``epsilon`` is that of the whole, so what the extension costs is known before any work. A
        run of this plan, finished or not, goes on by ``start`` with its ledger, which keeps the
        extension; without it there is nothing to go on with. Correlated noise begins a new block.

        Args:
            steps, epochs: how many more; one of the two.
            target_epsilon: a new target for the whole; None keeps the plan's.

        Raises:
            ValueError: if the whole exceeds the target, naming what it would be.
        """
        require_alike(self.beside, True)
        more = extension_of(self.whole_course, steps, epochs)
        whole = self.whole_course.then(more)
        event = whole.event(self.event.clipping, self.event.bands)
        report = epsilon_report(event, self.delta)
        require_target(report, self.target_epsilon, target_epsilon)
        parts: dict[str, Any] = dict(
            event=event,
            report=report,
            course=whole if whole.varies else None,
            noise=replace(self.noise, mixing=longer(self.noise.mixing, more.steps)),
            phase_lengths=(*(self.phase_lengths or (self.steps,)), more.steps),
            extensions=(*self.extensions, (more, target_epsilon)),
            target_epsilon=self.target_epsilon if target_epsilon is None else target_epsilon,
        )
        longer_plan: Plan = replace(cast(Any, self), **parts)
        return longer_plan

    def event_scaled(self, factor: float) -> PrivacyEvent:
        """What ``scaled`` releases."""
        if self.course is not None:
            return self.course.scaled(factor).event(self.event.clipping, self.event.bands)
        assert isinstance(self.event, PoissonGaussian)  # ``require_course``
        sigma = self.event.noise_multiplier * factor
        beside = releases_beside(self.beside, sigma)
        return replace(self.event, noise_multiplier=sigma, beside=beside)

    def scaled(self: Plan, factor: float) -> Plan:
        """This plan with every noise multiplier times ``factor``, and so another epsilon than its
        target, which it no longer has.
        """
        course = None if self.course is None else self.course.scaled(factor)
        event = self.event_scaled(factor)
        sigma = event.noise_multiplier if course is None else course.least_noise  # type: ignore[union-attr]
        parts: dict[str, Any] = dict(
            event=event,
            course=course,
            report=epsilon_report(event, self.delta),
            noise=replace(self.noise, noise_multiplier=sigma, beside=event.beside),
            target_epsilon=None,
        )
        other: Plan = replace(cast(Any, self), **parts)
        return other


def calibrated_scale(
    shape: Course, target_epsilon: float, delta: float, clipping: ClippingClaim, bands: int
) -> float:
    """The smallest factor found on the noise multipliers of ``shape`` with which all its steps
    together stay within the target.

    Raises:
        ValueError: where no factor up to 1e6 meets it.
    """
    return calibrate_by_groups(
        lambda scale: shape.scaled(scale).event(clipping, bands), delta, target_epsilon
    )


def require_course(
    course: Course | None, event: PrivacyEvent, sampler: PoissonSampler, max_grad_norm: float
) -> None:
    """What runs step by step is what is accounted for; it can only fail if a plan was put together
    by hand.

    Raises:
        ValueError: with the remedy.
    """
    if course is None:
        if isinstance(event, EventSequence):
            raise ValueError(f"settings that change are accounted for, and none would run; {BUILD}")
        return
    if course.event(event.clipping, event.bands) != event:
        raise ValueError(
            "the noise multiplier or sampling rate of some step that would run is not the "
            f"accounted one; {BUILD}"
        )
    if sampler.sample_rate != course.highest_rate or max_grad_norm != course.at(0).max_grad_norm:
        raise ValueError(f"sampler or clipper are not those of the settings by step; {BUILD}")


def extension_of(whole: Course, steps: int | None, epochs: float | None) -> Course:
    """The steps that come on top, all at the last settings.

    Args:
        whole: the settings so far.
        steps, epochs: how many; one of the two.

    Raises:
        ValueError, TypeError: naming the argument and the remedy.
    """
    if steps is None and epochs is None:
        raise ValueError(
            "an extension has neither steps nor epochs, and a new target alone does not say how "
            "far to train: give how many more (--extend-steps or --extend-epochs)"
        )
    last = whole.at(whole.steps - 1)
    return Course(((steps_of(steps, epochs, last.sample_rate, 1.0, ""), last),))


def require_target(report: EpsilonReport, target: float | None, new: float | None) -> None:
    """Refuses an extension that exceeds the plan's target, unless a new one is given by name.

    Args:
        report: of the whole, extension included.
        target: of the plan so far; None where a noise multiplier was given.
        new: the new target, if any.

    Raises:
        ValueError: naming the total, the target and the remedy.
    """
    if new is not None:
        require_positive("target_epsilon", new)
    limit = target if new is None else new
    if limit is not None and not report.epsilon <= as_plain(limit):
        remedy = "allow it by target_epsilon= (--extend-to-epsilon), or add fewer steps"
        top = f"the plan's target of {limit:g}" if new is None else f"target_epsilon={new!r}"
        raise ValueError(
            f"with the extension epsilon is {round_up_to(report.epsilon, 6)} in all, above {top}; "
            f"{remedy}"
        )


def longer(mixing: BandedLower | None, steps: int) -> BandedLower | None:
    """A mixing matrix with so many more rows: blocks that begin anew, each the leading part of the
    first block. Columns are those of the matrix, or shortened, so their norms stay at most 1.
    """
    if mixing is None:
        return None
    blocks, left = [mixing.columns], steps
    while left > 0:
        rows = min(left, mixing.steps)
        blocks.append(mixing.columns[:rows] * inside(rows, mixing.bands))
        left -= rows
    return BandedLower(np.concatenate(blocks))


def require_run_to_extend(extensions: Sequence[object], ledger: str | Path | None) -> None:
    """More steps are of a run that was begun: from its first step on, a plan that was extended
    would make all of them once more, and tell an epsilon without those that were made.

    Raises:
        ValueError: without the ledger of that run, with the remedy.
    """
    if extensions and (ledger is None or not holds_records(Path(ledger))):
        raise ValueError(
            f"ledger={None if ledger is None else str(ledger)!r} holds no run, and this plan is "
            "one with steps on top of a run's: start it with the ledger of that run, or build a "
            "plan with as many steps (PrivacyConfig(steps=)) for a new one"
        )


def require_same(
    contents: LedgerContents, planned: Mapping[str, object], extensions: Sequence[Course]
) -> None:
    """A plan goes on only with the ledger of its own mechanism and extensions.

    Raises:
        ValueError: naming what is another, and the remedy.
    """
    changed = changes(contents.header, planned)
    if changed:
        raise ChangedSettings(changed)
    written = [extension.course for extension in contents.extensions]
    if written != list(extensions[: len(written)]):
        raise ValueError(
            f"the run was extended by {[more.steps for more in written]} steps, and this plan by "
            f"{[more.steps for more in extensions]}; extend the plan as its ledger says "
            "(plan.extended(steps=...)), then further if you like"
        )
