"""One run of a comparison after another in one process: data, model, cached states and mixing
matrices are prepared once.
"""

from __future__ import annotations

import json
import time
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
from quietgrad.tensors import trainable_parameters
from quietgrad.training.evaluation import score_of
from quietgrad.training.optimizers import build_optimizer, step_on_release
from quietgrad.training.prepare import build_plan, prepare
from quietgrad.training.settings.config import TrainConfig
from quietgrad.training.settings.noise import check_spectrum
from quietgrad.training.tasks.metrics import ACCURACY
from quietgrad.training.tasks.records import Records, distinct, spread


class ComparisonRunner:
    """Data, model and cached states, shared by the runs of one process."""

    def __init__(self, comparison: Comparison) -> None:
        # The same run in every process, whichever it makes first: its seed initialises the
        # parameters of all.
        prepared = prepare(comparison.config_of(comparison.first))
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
        self._mixings: dict[str, MixingMatrix] = {}

    def train(self, run: Run) -> dict[str, Any]:
        """One run from the initial parameters: its line of the results file."""
        config = self.comparison.config_of(run)
        plan = self._plan(config)
        assert plan is not None
        prepared = replace(
            self.prepared, config=config, plan=plan, sampler=plan.sampler, steps=plan.steps
        )
        with torch.no_grad():
            for name, parameter in trainable_parameters(self.model).items():
                parameter.copy_(self.initial[name])
                parameter.grad = None
        rule = config.momentum_rule
        optimizer, schedule = build_optimizer(self.model, config.optimizer, plan.steps, rule)
        decay = config.training.averaging
        average = ExponentialAverage(self.model, decay) if decay else None
        loss = prepared.loss()
        curve: list[tuple[int, float]] = []
        started = time.monotonic()
        with plan.start() as private:
            for step, indices in enumerate(private.batches()):
                torch.manual_seed(
                    private.model_seed()
                )  # dropout: the same whichever runs came before
                batches = self.prepared.micro_batches(indices, self.caches["train"])
                noisy = private.backward(self.model, loss, batches)
                schedule(step)
                step_on_release(optimizer, noisy)
                if average is not None:
                    average.update()
                if (step + 1) % self.comparison.table.eval_every == 0 and step + 1 < plan.steps:
                    curve.append((step + 1, self._validated(self.scheduled, average)[0]))
        score, averaged = self._validated(self.counted["validation"], average)
        curve.append((plan.steps, score))
        if average is not None and averaged:
            average.write()
        return {
            **run.record(),
            "key": self.comparison.key_of(run),
            "curve": curve,
            "test": self._score("test", self.counted["test"]),
            "noise_multiplier": plan.noise_multiplier,
            "steps": plan.steps,
            **({"unit": "user"} if plan.sampler.users is not None else {}),
            **({} if prepared.metric is ACCURACY else {"metric": prepared.metric.name}),
            "seconds": round(time.monotonic() - started, 1),
        }

    def _plan(self, config: TrainConfig) -> PrivacyPlan | None:
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
        plan = build_plan(config, task.record_ids, self._mixings.get(settings), task.record_owner)
        if plan is not None and plan.mixing is not None:
            self._mixings[settings] = plan.mixing
        return plan

    def _records(self, part: str) -> Records:
        records: Records = getattr(self.prepared, part)
        return records

    def _validated(
        self, records: NDArray[np.int64], average: ExponentialAverage | None
    ) -> tuple[float, bool]:
        """The score on validation records, and whether it is that of the averaged weights."""
        score = self._score("validation", records)
        if average is None:
            return score, False
        with average.applied():
            averaged = self._score("validation", records)
        return max(score, averaged), averaged >= score

    def _score(self, part: str, records: NDArray[np.int64]) -> float:
        return score_of(self.prepared, self.model, self._records(part), records, self.caches[part])
