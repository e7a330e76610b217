"""Runs that go on beyond their last planned step."""

from __future__ import annotations

from dataclasses import dataclass

from quietgrad.ledger import holds_records, read_ledger
from quietgrad.plan import PrivacyPlan
from quietgrad.training.files.run_dir import RunDir


@dataclass(frozen=True)
class Extend:
    """What is asked for on top.

    Attributes:
        steps, epochs: how many more; one of the two, or neither for none.
        target_epsilon: a new target for the whole; None keeps the run's.
    """

    steps: int | None = None
    epochs: float | None = None
    target_epsilon: float | None = None

    @property
    def asked(self) -> bool:
        """Whether anything is."""
        return (self.steps, self.epochs, self.target_epsilon) != (None, None, None)


def as_recorded(plan: PrivacyPlan, run_dir: RunDir) -> PrivacyPlan:
    """The plan with the extensions that the ledger of its run holds."""
    if not holds_records(run_dir.ledger):
        return plan
    for known in read_ledger(run_dir.ledger).extensions:
        plan = plan.extended(steps=known.course.steps, target_epsilon=known.target_epsilon)
    return plan


def extended(plan: PrivacyPlan | None, run_dir: RunDir, extend: Extend) -> PrivacyPlan | None:
    """The plan with recorded extensions and the one that is asked for.

    Raises:
        ValueError: if the whole exceeds the target, or nothing is accounted for.
    """
    if plan is None:
        if extend.asked:
            raise ValueError(
                "privacy.enabled=false: an extension is accounted for, and this run has no "
                "epsilon; begin a new run with more training.steps"
            )
        return None
    plan = as_recorded(plan, run_dir)
    if not extend.asked:
        return plan
    return plan.extended(
        steps=extend.steps, epochs=extend.epochs, target_epsilon=extend.target_epsilon
    )
