"""One run of a comparison after another in one process: data, model, cached states and mixing matrices are prepared once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.noise.mixing import MixingMatrix
from quietgrad.plan import PrivacyPlan
from quietgrad.tensors import trainable_parameters
from quietgrad.training.comparison_table import Comparison, Run
from quietgrad.training.config import TrainConfig
from quietgrad.training.evaluation import score_of
from quietgrad.training.feature_cache import FeatureCache
from quietgrad.training.metrics import ACCURACY
from quietgrad.training.noise_settings import check_spectrum
from quietgrad.training.optimizers import build_denoiser, build_optimizer, step_on_release
from quietgrad.training.prefix_cache import PrefixCache
from quietgrad.training.prepare import build_plan, prepare
from quietgrad.training.records import Records, distinct, spread


class Workbench:
    """Data, model and cached states, shared by the runs of one process."""

    def __init__(self, comparison: Comparison) -> None:
        # The same run in every process, whichever it makes first: its seed initialises the parameters of all.
        prepared = prepare(comparison.config_of(comparison.first))
        for variant in comparison.variants:  # before any run: a spectrum that is missing or does not fit
            check_spectrum(
                comparison.config_of(replace(comparison.first, variant=variant)),
                prepared.model.classifier,
                prepared.task.record_ids,
                prepared.task.image_shape,
            )
        self.prepared = prepared
        self.comparison = comparison
        self.caches = {
            name: prepared.prefix_cache(texts)
            for name, texts in (("train", prepared.train), ("validation", prepared.validation), ("test", prepared.test))
        }
        train = self.caches["train"]
        self.model: nn.Module = prepared.model.classifier if train is None else train.upper
        self.initial = {name: p.detach().clone() for name, p in trainable_parameters(self.model).items()}
        everything = distinct if comparison.table.distinct else (lambda records: np.arange(len(records)))
        self.counted = {name: everything(self._records(name)) for name in ("validation", "test")}
        validation, every = self.counted["validation"], comparison.table.eval_records
        self.scheduled = validation[spread(validation, every or len(validation))]
        self._mixings: dict[str, MixingMatrix] = {}

    def train(self, run: Run) -> dict[str, Any]:
        """One run from the initial parameters: its line of the results file."""
        config = self.comparison.config_of(run)
        plan = self._plan(config)
        assert plan is not None
        prepared = replace(self.prepared, config=config, plan=plan, sampler=plan.sampler, steps=plan.steps)
        with torch.no_grad():
            for name, parameter in trainable_parameters(self.model).items():
                parameter.copy_(self.initial[name])
                parameter.grad = None
        denoiser = build_denoiser(config.denoising)
        optimizer, schedule = build_optimizer(self.model, config.optimizer, prepared.steps, denoiser)
        loss = prepared.loss()
        curve: list[tuple[int, float]] = []
        started = time.monotonic()
        with plan.start() as private:
            for step, indices in enumerate(private.batches()):
                total: ClippedSum | None = None
                for part in self._micro_batches(indices):
                    clipped = private.clip(self.model, loss, self._collate("train", part))
                    total = clipped if total is None else total + clipped
                assert total is not None
                noisy = private.release(total)
                schedule(step)
                step_on_release(optimizer, denoiser, self.model, noisy, plan.expected_batch_size)
                if (step + 1) % self.comparison.table.eval_every == 0 and step + 1 < plan.steps:
                    curve.append((step + 1, self._score("validation", self.scheduled)))
        curve.append((plan.steps, self._score("validation", self.counted["validation"])))
        return {
            **run.record(),
            "key": self.comparison.key_of(run),
            "curve": curve,
            "test": self._score("test", self.counted["test"]),
            "noise_multiplier": plan.noise_multiplier,
            "steps": plan.steps,
            **({} if prepared.metric is ACCURACY else {"metric": prepared.metric.name}),
            "seconds": round(time.monotonic() - started, 1),
        }

    def _plan(self, config: TrainConfig) -> PrivacyPlan | None:
        """The plan; a mixing matrix that an earlier run needed too is not found again."""
        tree = config.to_dict()
        tree["training"].pop("seed", None)  # all that a matrix can depend on, and more; not the seed
        settings = json.dumps([tree[table] for table in ("noise", "optimizer", "privacy", "clipping", "training")])
        task = self.prepared.task
        check_spectrum(config, self.model, task.record_ids, task.image_shape)
        plan = build_plan(config, self.prepared.task.record_ids, self._mixings.get(settings))
        if plan is not None and plan.mixing is not None:
            self._mixings[settings] = plan.mixing
        return plan

    def _records(self, part: str) -> Records:
        records: Records = getattr(self.prepared, part)
        return records

    def _collate(self, part: str, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        cache = self.caches[part]
        source: PrefixCache | FeatureCache | Records = self._records(part) if cache is None else cache
        return source.collate(indices, self.prepared.device)

    def _micro_batches(self, indices: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        if not len(indices):
            yield indices  # an empty batch is a legal step
        yield from self.prepared.train.micro_batch_indices(
            indices, self.prepared.config.clipping.max_physical_batch_size
        )

    def _score(self, part: str, records: NDArray[np.int64]) -> float:
        return score_of(self.prepared, self.model, self._records(part), records, self.caches[part])
