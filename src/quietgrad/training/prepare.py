"""Everything that can go wrong before training goes wrong here: configuration, data, model, plan,
layers, run directory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quietgrad.clipping.capture.examples import UserBatch
from quietgrad.clipping.soundness.refusals import refuse_cross_example_layers
from quietgrad.clipping.verify import verify_clipping
from quietgrad.loading.draws import users_in_parts
from quietgrad.noise.correlation.mixing import MixingMatrix
from quietgrad.noise.methods import IndependentNoise
from quietgrad.plan import PrivacyPlan
from quietgrad.plan.seeds import beginning_of
from quietgrad.sampling import PoissonSampler, UserIndices
from quietgrad.schedules import Course
from quietgrad.tensors import trainable_parameters
from quietgrad.training.derived.resolve import (
    Machine,
    Reasons,
    is_open,
    resolved,
    why_it_trains,
    with_what_trains,
)
from quietgrad.training.derived.speed import Sample
from quietgrad.training.files.provenance import Record, check_start
from quietgrad.training.precision import device_of, precision_context, warn_of_rounding
from quietgrad.training.settings.config import TrainConfig
from quietgrad.training.settings.noise import check_spectrum
from quietgrad.training.settings.planned import build_plan, plan_of_batches
from quietgrad.training.sources.hub import require_model
from quietgrad.training.tasks.images.public_weights import check_public_weights
from quietgrad.training.tasks.loaded import LoadedModel, trainable_count
from quietgrad.training.tasks.metrics import MEAN_AUC, Metric, dividing
from quietgrad.training.tasks.records import Records, Told, spread, unheard
from quietgrad.training.tasks.registry import load_task
from quietgrad.training.tasks.task import Task

# The fast path may differ from the slow oracle by rounding only.
LARGEST_DIFFERENCE = {"float32": 1e-4, "bfloat16": 1e-1}


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start.

    Attributes:
        config: what was asked for.
        task: raw records.
        train, validation, test: records as the model reads them.
        model: the classifier, on the device.
        plan: the privacy plan; None for a run that is not private.
        sampler: the batches, the same with and without privacy.
        course: the settings of every step; without privacy, of what a private run would sample.
        steps: T.
        device: where the model is.
        started_from: what the outputs of earlier runs that it starts from say of themselves.
        reasons: setting that was left out -> why it is what it is.
    """

    config: TrainConfig
    task: Task
    train: Records
    validation: Records
    test: Records
    model: LoadedModel
    plan: PrivacyPlan | None
    sampler: PoissonSampler
    course: Course
    steps: int
    device: torch.device
    started_from: tuple[Record, ...] = ()
    reasons: Reasons = field(default_factory=dict)

    @property
    def expected_batch_size(self) -> float:
        """B; with a schedule, the largest."""
        if self.plan is not None:
            return self.plan.expected_batch_size
        return self.sampler.sample_rate * self.sampler.dataset_size

    def batch_size_at(self, step: int) -> float:
        """B of a step without privacy."""
        return self.course.at(step).sample_rate * self.sampler.dataset_size

    @property
    def metric(self) -> Metric:
        """What the model is judged by."""
        return self.task.metric(self.validation)

    @cached_property
    def scheduled(self) -> Records:
        """The validation records that are looked at between steps."""
        every = self.config.training.eval_records
        return self.validation.subset(spread(self.validation, every)) if every else self.validation

    @property
    def evaluation_batch(self) -> int:
        """Records of a batch without gradients."""
        return self.task.evaluation_batch(self.config)

    def loss(self) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
        """(model, micro-batch) -> [examples], under autocast where the config asks for it; from
        inputs or cached states alike.
        """
        per_example = self.task.loss

        def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            with precision_context(self.config, self.device):
                return per_example(model, batch)

        return loss

    def prefix_cache(self, records: Records | None = None, told: Told = unheard) -> Any:
        """States of the training records (or others) below the lowest trainable part, computed
        once; None where that does not apply or is switched off. ``told`` as of ``Task.cache``.
        """
        if not self.config.training.caches:
            return None
        wanted = self.train if records is None else records
        told = told if self.combined is None else unheard  # how many records users have is private
        given = (self.config, self.model.classifier, wanted, self.validation, self.device)
        return self.task.cache(*given, told)

    def sample(self) -> Sample:
        """A micro-batch of validation records as training would take it."""
        size = min(self.config.physical_batch_size, len(self.validation))
        typical = self.validation.subset(self.validation.middle(size))
        started = time.perf_counter()
        cache = self.prefix_cache(typical)
        if cache is None:
            batch = typical.collate(np.arange(size), self.device)
            return Sample(self.model.classifier, batch, size, 0.0, False)
        caching = (time.perf_counter() - started) / size
        return Sample(cache.upper, cache.collate(np.arange(size), self.device), size, caching, True)

    @property
    def records_to_cache(self) -> int:
        """As many as are stated. How many all users have is private, and a time would tell it: what
        is counted is users at the cap.
        """
        if self.combined is None:
            return len(self.train)
        return self.sampler.dataset_size * self.config.users.records_per_user

    def measured(self, sample: Sample) -> Machine:
        """What a step, and what comes before the first, take on this machine."""
        clipper = None if self.plan is None else self.plan.clipper
        users = self.combined is not None
        most = self.config.users.records_per_user if users else 1
        return Machine(
            seconds=sample.seconds(clipper, self.loss(), users) / sample.size * most,
            before=sample.caching * self.records_to_cache,
            parameters=trainable_count(self.model.classifier),
            head_input=sample.head_input(),
        )

    @property
    def combined(self) -> Literal["mean", "sum"] | None:
        """What of a user's records is one gradient; None where records are protected."""
        return self.config.users.combined if self.config.data.user else None

    def micro_batches(
        self, indices: NDArray[np.int64] | UserIndices, cache: Any
    ) -> Iterator[dict[str, Tensor] | UserBatch]:
        """The training records at ``indices`` in micro-batches that are cheap to make, from their
        cached states where there are some; of users, in micro-batches of whole users. For no record
        one empty micro-batch: it is a step like others.
        """
        source = self.train if cache is None else cache
        if isinstance(indices, UserIndices):
            if not len(indices):
                yield UserBatch(source.collate(indices.records, self.device), ())
            for users in users_in_parts(indices, self.config.physical_batch_size):
                yield UserBatch(source.collate(users.records, self.device), users.sizes)
            return
        if not len(indices):
            yield source.collate(indices, self.device)
        size = self.config.physical_batch_size
        for part in self.train.micro_batch_indices(indices, size):
            yield source.collate(part, self.device)


def prepare(
    config: TrainConfig,
    mixing: MixingMatrix | None = None,
    extend: Callable[[PrivacyPlan | None], PrivacyPlan | None] | None = None,
    say: Callable[[str], None] = lambda stage: None,
    beginning: int | None = None,
) -> Prepared:
    """Loads data and model, builds the plan, and checks all of it.

    Args:
        config: what to train.
        mixing: the matrix of a run that goes on.
        extend: makes the plan longer; before the model is loaded.
        say: called with what begins now, in a few words.
        beginning: of the weights that begin at random, where several processes have to begin alike;
            see ``plan.seeds.beginning_of``.

    Raises:
        ValueError, TypeError: for anything the user can mend, naming key, value and remedy.
    """
    device = device_of(config.training.device)
    warn_of_rounding(config)
    why_tune = why_it_trains(config)
    config = with_what_trains(config)
    require_model("model.name", config.model.name, config.model.weights)
    say(f"reading {config.data.source}")
    task = load_task(config)
    if task.record_owner is not None and len(set(task.record_owner)) < 2:
        raise ValueError(
            f"data.user={config.data.user!r} names fewer than two users among the training "
            "records; name the column that tells people apart, or add people"
        )
    check_public_weights(config.model.weights, task.record_ids, task.form)
    started_from = start_of(config)
    # The plan is built before the model is loaded: its mistakes are cheaper to find.
    say("calibrating the noise")
    asked, opened = config, is_open(config)
    if opened:  # as if the hours were enough; correlated noise takes its time, and waits
        config, _ = resolved(asked, _units(task))
    plan = _plan(replace(config, noise=IndependentNoise()) if opened else config, task, mixing)
    plan = plan if extend is None else extend(plan)
    reference = _batches(config, task) if plan is None else plan
    torch.manual_seed(beginning_of(config.training.seed) if beginning is None else beginning)
    say(f"loading {config.model.name}")
    model, (train, validation, test) = task.read(config, device)
    trainable_parameters(model.classifier)
    refuse_cross_example_layers(model.classifier)
    check_spectrum(config.noise, model.classifier, task.record_ids, task.form)
    prepared = Prepared(
        config,
        task,
        train,
        validation,
        test,
        model,
        plan,
        reference.sampler,
        reference.whole_course,
        reference.steps,
        device,
        started_from,
        {} if why_tune is None else {"model.tune": why_tune},
    )
    if opened:
        say("measuring a step on validation records")
        prepared = _fitted(prepared, asked, mixing)
    if prepared.metric is MEAN_AUC:
        for name, part in (
            ("validation records (training.eval_records)", prepared.scheduled),
            ("test records", test),
        ):
            if not dividing(part.labels).any():
                raise ValueError(
                    f"no label divides the {len(part)} {name}, so they have no mean AUC; use more"
                )
    return prepared


def _units(task: Task) -> int:
    """N: users where they are protected."""
    return len(task.record_ids if task.record_owner is None else set(task.record_owner))


def _plan(config: TrainConfig, task: Task, mixing: MixingMatrix | None) -> PrivacyPlan | None:
    return build_plan(config, task.record_ids, mixing, task.record_owner)


def _batches(config: TrainConfig, task: Task) -> PrivacyPlan:
    return plan_of_batches(config, task.record_ids, task.record_owner)


def _fitted(prepared: Prepared, asked: TrainConfig, mixing: MixingMatrix | None) -> Prepared:
    """With the settings that were left out, now that model and machine are known."""
    config, reasons = resolved(asked, _units(prepared.task), prepared.measured(prepared.sample()))
    plan = _plan(config, prepared.task, mixing)
    reference = _batches(config, prepared.task) if plan is None else plan
    return replace(
        prepared,
        config=config,
        plan=plan,
        sampler=reference.sampler,
        course=reference.whole_course,
        steps=reference.steps,
        reasons={**prepared.reasons, **reasons},
    )


def start_of(config: TrainConfig) -> tuple[Record, ...]:
    """What the outputs of earlier runs that a configuration starts from say of themselves; a start
    that would not be covered is refused.
    """
    protect = config.privacy.enabled and not config.data.public
    return check_start(config.model.name, config.model.weights, config.model.accept_start, protect)


def verify_on_public_records(prepared: Prepared) -> float:
    """Compares the clipping engine with the slow oracle on three validation records; returns the
    largest relative difference.

    Raises:
        RuntimeError: if they disagree by more than rounding.
    """
    model, records, config = prepared.model.classifier, prepared.validation, prepared.config
    batch = records.collate(np.arange(min(3, len(records))), prepared.device)
    with _head_off_zero(model):
        difference = verify_clipping(model, prepared.loss(), batch, config.performance.engine)
    limit = LARGEST_DIFFERENCE[config.training.precision]
    if not difference < limit:
        raise RuntimeError(
            f"per-example clipping disagrees with plain autograd by {difference:.1e} (limit "
            f"{limit:g}) on validation records: some layer of "
            f"{config.model.name!r} is captured wrongly; train other layers (model.tune, "
            "model.lora_targets) and report this"
        )
    return difference


@contextlib.contextmanager
def _head_off_zero(classifier: nn.Module) -> Any:
    """A head of zeros lets no gradient through: for the check it is filled with small numbers, and
    put back.
    """
    head = getattr(classifier, "head", None)
    if not isinstance(head, nn.Linear):
        yield
        return
    saved = head.weight.detach().clone()
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-0.1, 0.1, saved.numel()).reshape(saved.shape).sin())
    try:
        yield
    finally:
        with torch.no_grad():
            head.weight.copy_(saved)
