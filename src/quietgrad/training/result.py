"""What is told of a run: the facts that ``plan`` and ``train`` share, the result record, and what a
saved model says of its training.
"""

from __future__ import annotations

from typing import Any

from quietgrad.accounting import epsilon
from quietgrad.ledger import LedgerContents
from quietgrad.ledger.earlier import told_starts
from quietgrad.plan import PrivacyPlan
from quietgrad.training.files.provenance import Record, provenance
from quietgrad.training.files.run_dir import RunDir
from quietgrad.training.prepare import Prepared
from quietgrad.training.tasks.loaded import trainable_count
from quietgrad.training.tasks.task import FinalScores


def trained_on(prepared: Prepared, done: int, ledger: LedgerContents | None = None) -> Record:
    """What the saved model says of its training; ``ledger``: of a private run that has one."""
    plan, config = prepared.plan, prepared.config
    facts = None
    if plan is not None:
        spent = {"epsilon": epsilon_so_far(prepared, done), "delta": plan.delta, "steps": done}
        facts = {
            **spent,
            "neighbouring": plan.neighbouring,
            "noise_multiplier": plan.noise_multiplier,
            "sample_rate": plan.sampler.sample_rate,
            "bands": plan.event.bands,
            **plan.told_users(),
            **plan.told_beside(),
            **({} if plan.course is None else {"settings_change": True}),
        }
    run = next((start.name for start in ledger.sessions), "") if ledger and facts else ""
    return provenance(config.data.source, facts, config.data.public, prepared.started_from, run)


def facts_of(prepared: Prepared) -> dict[str, Any]:
    """What a run is, before it is made: for the forecast and for the result."""
    plan = prepared.plan
    facts: dict[str, Any] = {
        "private": plan is not None,
        "data_declared_public": prepared.config.data.public,
        "trainable_parameters": trainable_count(prepared.model.classifier),
        "records": {
            # How many records all users have together says how many one has to who knows the rest.
            **({"train": len(prepared.train)} if prepared.combined is None else {}),
            "validation": len(prepared.validation),
            "test": len(prepared.test),
        },
    }
    if prepared.combined is not None:
        facts["users"] = prepared.sampler.dataset_size
        facts["records_per_user"] = prepared.config.users.records_per_user
        facts["combined"] = prepared.combined
        facts["choice"] = prepared.config.users.choice
    if plan is not None:
        facts |= {
            "epsilon": plan.epsilon,
            "delta": plan.delta,
            "noise_multiplier": plan.noise_multiplier,
            "sample_rate": plan.sampler.sample_rate,
            **course_facts(plan),
            "neighbouring": plan.neighbouring,
            **plan.told_beside(),
        }
    return facts


def course_facts(plan: PrivacyPlan) -> dict[str, Any]:
    """The settings of every step, where they change, and what was planned on top."""
    facts: dict[str, Any] = {}
    if plan.course is not None:
        facts["course"] = plan.course.to_json()
    if plan.extensions:
        facts["extended_by"] = [more.steps for more, _ in plan.extensions]
    return facts


def result_of(
    prepared: Prepared, run_dir: RunDir, done: int, scores: FinalScores | None
) -> dict[str, Any]:
    """The result record after ``done`` steps; ``scores`` are None where a run was stopped."""
    plan = prepared.plan
    result = {
        "epsilon": None,
        "delta": None,
        **facts_of(prepared),
        "steps": done,
        "planned_steps": prepared.steps,
        "metrics": scores.metrics if scores else {},
        "run_dir": str(run_dir.path),
        "metric": prepared.metric.key,
    }
    if scores is not None:
        result["scored_records"] = scores.counted
        if scores.guessing is not None:
            result["majority_accuracy"] = scores.guessing
        if scores.classes:
            result["class_scores"] = scores.classes
    result |= told_starts(prepared.started_from)
    if plan is not None:
        result["epsilon"] = epsilon_so_far(prepared, done)
        if plan.seed is not None and not plan.data_are_public:
            result["seed_warning"] = (
                "the noise is reproducible from the seed: the guarantee holds only if the seed "
                "stays secret and serves one run"
            )
    return result


def epsilon_so_far(prepared: Prepared, done: int) -> float:
    if prepared.plan is None:
        return float("inf")
    if done == prepared.steps:
        return prepared.plan.epsilon
    return epsilon(prepared.plan.event.after(done), prepared.plan.delta) if done else 0.0


class ShownEpsilon:
    """Epsilon for the progress bar: computed at twentieths of the run and at evaluations, and
    rounded up to the next of them, still an upper bound. At evaluations it is what the metrics say.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        twentieth = max(1, -(-prepared.steps // 20))
        every = prepared.config.training.eval_every
        self._strides = (twentieth, every) if every else (twentieth,)
        self._known: dict[int, float] = {}

    def at(self, done: int) -> float:
        following = (-(-done // stride) * stride for stride in self._strides)
        step = min(*following, self._prepared.steps)
        if step not in self._known:
            self._known[step] = epsilon_so_far(self._prepared, step)
        return self._known[step]
