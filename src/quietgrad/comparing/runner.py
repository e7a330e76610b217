"""One run of a comparison after another in one process: data, model, cached states and mixing
matrices are prepared once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from quietgrad.averaging import ExponentialAverage
from quietgrad.comparing.table import Comparison, Run
from quietgrad.noise.correlation.mixing import MixingMatrix
from quietgrad.plan import PrivacyPlan
from quietgrad.plan.session.trained import note_set_back
from quietgrad.tensors import trainable_parameters
from quietgrad.training.evaluation import score_of
from quietgrad.training.optimizers import build_optimizer, step_on_release
from quietgrad.training.prepare import prepare
from quietgrad.training.runner import guard_on_public_records
from quietgrad.training.settings.config import TrainConfig
from quietgrad.training.settings.noise import check_spectrum
from quietgrad.training.settings.planned import build_plan
from quietgrad.training.tasks.metrics import ACCURACY
from quietgrad.training.tasks.records import Records, distinct, spread


class ComparisonRunner:
    """Data, model and cached states, shared by the runs of one process."""

    def __init__(
        self,
        comparison: Comparison,
        seed: str | None = None,
        say: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """Prepares.

        Args:
            comparison: whose runs.
            seed: initialises the parameters of all runs, in place of the first run's; for records
                that are private.
            say: called with what begins now, in a few words.
        """
        # The same run in every process, whichever it makes first: its seed initialises the
        # parameters of all.
        config = comparison.config_of(comparison.first)
        prepared = prepare(config if seed is None else seeded(config, seed), say=say)
        for (
            variant
        ) in comparison.variants:  # before any run: a spectrum that is missing or does not fit
            check_spectrum(
                comparison.config_of(replace(comparison.first, variant=variant)).noise,
                prepared.model.classifier,
                prepared.task.record_ids,
                prepared.task.form,
            )
        self.prepared = prepared
        self.comparison = comparison
        say("preparing what all runs share")
        self.caches = {
            name: prepared.prefix_cache(texts)
            for name, texts in (
                ("train", prepared.train),
                ("validation", prepared.validation),
                ("test", prepared.test),
            )
        }
        train = self.caches["train"]
        self.model: nn.Module = prepared.model.classifier if train is None else train.upper
        self.initial = {
            name: p.detach().clone() for name, p in trainable_parameters(self.model).items()
        }
        everything = (
            distinct if comparison.table.distinct else (lambda records: np.arange(len(records)))
        )
        self.counted = {name: everything(self._records(name)) for name in ("validation", "test")}
        validation, every = self.counted["validation"], comparison.table.eval_records
        self.scheduled = validation[spread(validation, every or len(validation))]
        self.mixings: dict[str, MixingMatrix] = {}  # by settings

    def train(
        self, run: Run, progress: Callable[[int, int], None] = lambda done, steps: None
    ) -> dict[str, Any]:
        """One run from the initial parameters: its line of the results file.

        Args:
            run: which.
            progress: called with (steps made, all of the run) after each.
        """
        config = self.comparison.config_of(run)
        plan = self.plan(config)
        curve: list[tuple[int, float]] = []

        def look(done: int, average: ExponentialAverage | None) -> None:
            if done % self.comparison.table.eval_every == 0 and done < plan.steps:
                curve.append((done, self.validated(self.scheduled, average)[0]))
            progress(done, plan.steps)

        started = time.monotonic()
        average = self.fit(config, plan, look)
        curve.append((plan.steps, self.settle(average)))
        metric, users = self.prepared.metric, plan.sampler.users
        return {
            **run.record(),
            "key": self.comparison.key_of(run),
            "curve": curve,
            "test": self.score("test", self.counted["test"]),
            "noise_multiplier": plan.noise_multiplier,
            "steps": plan.steps,
            **({"unit": "user"} if users is not None else {}),
            **({} if metric is ACCURACY else {"metric": metric.name}),
            "seconds": round(time.monotonic() - started, 1),
        }

    def fit(
        self,
        config: TrainConfig,
        plan: PrivacyPlan,
        look: Callable[[int, ExponentialAverage | None], None] = lambda done, average: None,
        guard_on_public: bool = False,
    ) -> ExponentialAverage | None:
        """Trains the shared model from the initial parameters; the average of its weights, where
        one was asked for.

        Args:
            config, plan: of the run.
            look: called after every step with the number of steps made.
            guard_on_public: let the clipper's guard look at validation records, so that its refusal
                says nothing of private ones.
        """
        prepared = replace(
            self.prepared, config=config, plan=plan, sampler=plan.sampler, steps=plan.steps
        )
        with torch.no_grad():
            for name, parameter in trainable_parameters(self.model).items():
                parameter.copy_(self.initial[name])
                parameter.grad = None
        note_set_back(self.model)
        rule = config.momentum_rule
        optimizer, schedule = build_optimizer(self.model, config.optimizer, plan.steps, rule)
        decay = config.training.averaging
        average = ExponentialAverage(self.model, decay) if decay else None
        loss = prepared.loss()
        with plan.start() as private:
            private.coarse_told = config.training.precision != "float32"  # by ``prepare``
            if guard_on_public:
                guard_on_public_records(prepared, private, self.model, loss, self.caches["train"])
            for step, indices in enumerate(private.batches()):
                batches = self.prepared.micro_batches(indices, self.caches["train"])
                noisy = private.backward(self.model, loss, batches)
                schedule(step)
                step_on_release(optimizer, noisy)
                if average is not None:
                    average.update()
                look(step + 1, average)
        return average

    def settle(self, average: ExponentialAverage | None) -> float:
        """The score of the trained model on validation records; where they prefer the averaged
        weights, the model has those from now on.
        """
        score, averaged = self.validated(self.counted["validation"], average)
        if average is not None and averaged:
            average.write()
        return score

    def plan(self, config: TrainConfig) -> PrivacyPlan:
        """The plan; a mixing matrix that an earlier run needed too is not found again."""
        tree = config.to_dict()
        tree["training"].pop(
            "seed", None
        )  # all that a matrix can depend on, and more; not the seed
        settings = json.dumps(
            [tree[table] for table in ("noise", "optimizer", "privacy", "clipping", "training")]
        )
        task = self.prepared.task
        check_spectrum(config.noise, self.model, task.record_ids, task.form)
        plan = build_plan(config, task.record_ids, self.mixings.get(settings), task.record_owner)
        assert plan is not None  # a comparison without privacy is refused
        if plan.mixing is not None:
            self.mixings[settings] = plan.mixing
        return plan

    def _records(self, part: str) -> Records:
        records: Records = getattr(self.prepared, part)
        return records

    def validated(
        self, records: NDArray[np.int64], average: ExponentialAverage | None
    ) -> tuple[float, bool]:
        """The score on validation records, and whether it is that of the averaged weights."""
        score = self.score("validation", records)
        if average is None:
            return score, False
        with average.applied():
            averaged = self.score("validation", records)
        return max(score, averaged), averaged >= score

    def score(self, part: str, records: NDArray[np.int64]) -> float:
        return score_of(self.prepared, self.model, self._records(part), records, self.caches[part])


def seeded(config: TrainConfig, seed: str | None) -> TrainConfig:
    """The configuration with another seed; None: one of the operating system."""
    return replace(config, training=replace(config.training, seed=seed))
