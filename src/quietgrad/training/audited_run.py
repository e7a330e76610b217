"""The configured training, once, with canaries among its records: what ``quietgrad audit`` runs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from quietgrad.auditing import AuditReport, GradientCanaries, InputCanaries, audit_one_run
from quietgrad.auditing.bounds.errors import require_confidence_of_audit
from quietgrad.auditing.report import KINDS
from quietgrad.checks import default_delta, require_at_least, require_int, require_word
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.plan import PrivacyPlan
from quietgrad.tensors import trainable_parameters
from quietgrad.training.evaluation import score_of
from quietgrad.training.optimizers import build_optimizer, step_on_release
from quietgrad.training.prepare import Prepared, prepare
from quietgrad.training.settings.config import TrainConfig
from quietgrad.training.settings.planned import build_plan
from quietgrad.training.tasks.records import spread

IDENTITY_BYTES = 16
SCORED_RECORDS = 1000


@dataclass(frozen=True)
class AuditedRun:
    """A training run with canaries. Neither model nor releases are kept.

    Attributes:
        report: what the audit found.
        plan: for the records and the canaries.
        records: N, without the canaries; users where they are protected.
        metric: name of ``score``.
        score: of the trained model, on test records: shows that it trained.
    """

    report: AuditReport
    plan: PrivacyPlan
    records: int
    metric: str
    score: float


def audited_run(
    config: TrainConfig,
    canaries: int,
    kind: str,
    confidence: float,
    progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] = lambda stage: None,
) -> AuditedRun:
    """Trains as ``quietgrad train`` does, with ``canaries`` records more, and audits it. Writes
    nothing.

    Args:
        config: of ``quietgrad train``; privacy must be on.
        canaries: m.
        kind: "gradient", or "input": public validation records with a wrong label each; where users
            are protected, users who have one such record many times.
        confidence: of the bounds.
        progress: called with (releases made, all) after each.
        say: called with what begins before that, in a few words.

    Raises:
        ValueError: for bad arguments, and for everything that ``quietgrad train`` refuses.
    """
    require_word("kind", kind, KINDS)
    require_int("canaries", canaries)
    require_at_least("canaries", canaries, 2, "guesses need canaries; about a thousand are usual")
    require_confidence_of_audit(confidence)
    if not config.privacy.enabled:
        raise ValueError("privacy.enabled=false: there is no epsilon to audit; set it to true")
    prepared = prepare(config, say=say)
    config = prepared.config  # nothing of it is left out
    if kind == "input" and not prepared.task.classifies:
        raise ValueError(
            "input canaries are records with a wrong label, and these have none; use "
            "kind='gradient'"
        )
    if kind == "input" and canaries > len(prepared.validation):
        raise ValueError(
            f"canaries={canaries} exceeds the {len(prepared.validation)} public validation records "
            "that input canaries are made from; use fewer"
        )
    plan = plan_with(canaries, config, prepared.task.record_ids, prepared.task.record_owner)
    say("looking at the model before the first step")
    cache = prepared.prefix_cache()
    model: nn.Module = prepared.model.classifier if cache is None else cache.upper
    entries = sum(p.numel() for p in trainable_parameters(model).values())
    if kind == "gradient" and canaries > entries:
        raise ValueError(
            f"canaries={canaries} exceeds the {entries} trainable entries, each of which is one "
            f"gradient canary's own; use at most {entries}"
        )

    chosen = GradientCanaries(canaries) if kind == "gradient" else mislabelled(prepared, canaries)
    optimizer, schedule = build_optimizer(model, config.optimizer, plan.steps, config.momentum_rule)
    made = 0

    def update(noisy: NoisySum) -> None:
        nonlocal made
        schedule(made)
        plan.write_gradients(noisy, model)
        step_on_release(optimizer, noisy)
        made += 1

    report = audit_one_run(
        plan,
        model,
        prepared.loss(),
        lambda indices: prepared.micro_batches(indices, cache),
        chosen,
        update=update,
        confidence=confidence,
        progress=None if progress is None else lambda done: progress(done, plan.steps),
    )
    some = spread(prepared.test, SCORED_RECORDS)
    score = score_of(prepared, prepared.model.classifier, prepared.test, some)
    return AuditedRun(report, plan, plan.dataset_size - canaries, prepared.metric.name, score)


def plan_with(
    canaries: int,
    config: TrainConfig,
    record_ids: Sequence[bytes],
    record_owner: Sequence[bytes] | None,
) -> PrivacyPlan:
    """The plan for the records, or users, and the canaries after them. A user who is a canary has
    more records than may stand for a user, so that the cap has work to do.
    """
    names = [secrets.token_bytes(IDENTITY_BYTES) for _ in range(canaries)]
    if record_owner is not None:
        names = [name for name in names for _ in range(config.users.records_per_user + 1)]
        record_owner = [*record_owner, *names]
    units = {*record_owner} if record_owner is not None else [*record_ids, *names]
    delta, many = config.privacy.target_delta, len(units)
    if delta is not None and delta * many >= 1:
        raise ValueError(
            f"target_delta={delta!r} is not below 1/{many}, one over the number of records and "
            f"{canaries} canaries together; ask for fewer (--canaries), or set a smaller delta "
            f"(--set target_delta=...; the default is {default_delta(many):.2g})"
        )
    plan = build_plan(config, [*record_ids, *names], record_owner=record_owner)
    assert plan is not None
    return plan


def mislabelled(prepared: Prepared, count: int) -> InputCanaries:
    """Public validation records, each with a label that is not its own: their gradients are long,
    and the other records do not pull the same way.
    """
    order = np.random.default_rng(secrets.randbits(128))
    records = prepared.validation.subset(order.permutation(len(prepared.validation))[:count])
    cache = prepared.prefix_cache(records)
    batch = (records if cache is None else cache).collate(np.arange(count), prepared.device)
    labels = batch["labels"]
    if labels.dim() == 2:
        wrong = 1 - labels
    else:
        classes = len(prepared.task.label_names)
        wrong = (labels + torch.from_numpy(order.integers(1, classes, count)).to(labels)) % classes
    return InputCanaries(batch | {"labels": wrong})
