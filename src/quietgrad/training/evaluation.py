"""Scores of a prepared run's model on one part of its records."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from quietgrad.training.precision import precision_context
from quietgrad.training.prepare import Prepared
from quietgrad.training.tasks.metrics import ACCURACY
from quietgrad.training.tasks.records import Batches, Records, once, spread
from quietgrad.training.tasks.task import FinalScores


def score_of(
    prepared: Prepared,
    model: nn.Module,
    records: Records,
    chosen: NDArray[np.int64] | None = None,
    source: Batches | None = None,
) -> float:
    """The run's metric on ``records``, higher is better.

    Args:
        prepared: the run.
        model: its classifier, or what goes on from cached states.
        records: one part.
        chosen: indices of some of them; None: all.
        source: cached states of the same records.
    """
    with precision_context(prepared.config, prepared.device):
        return prepared.task.score(prepared.config, model, records, prepared.device, chosen, source)


def _all(records: Records) -> Records:
    return records


class Evaluator:
    """Scores of a run's model on its validation and test records, which are public.

    Where training starts from cached states, so do scores of validation records: their frozen lower
    part runs once, at the first evaluation, and not once an evaluation. Test records are looked at
    once and need no cache.

    Texts with equal inputs count once: a message that many passed on is one message.

    Attributes:
        validation, test: the records that count.
    """

    def __init__(self, prepared: Prepared, cached: bool) -> None:
        """Computes nothing yet.

        Args:
            prepared: the run.
            cached: whether training starts from cached states.
        """
        self._prepared = prepared
        self._cached = cached
        count = once if prepared.task.copies_count_once else _all
        self.validation, self.test = count(prepared.validation), count(prepared.test)
        every = prepared.config.training.eval_records
        self._scheduled = spread(self.validation, every) if every else None

    @property
    def scheduled_records(self) -> int:
        """Validation records that are looked at between steps."""
        return len(self.validation if self._scheduled is None else self._scheduled)

    def between_steps(self) -> float:
        """The metric on the validation records that are looked at between steps."""
        return self._validated(self._scheduled)

    def on_validation(self) -> float:
        """The metric on all validation records."""
        return self._validated(None)

    def final_scores(self) -> FinalScores:
        """What a finished run reports."""
        p, cache = self._prepared, self._cache
        with precision_context(p.config, p.device):
            found = p.task.final_scores(
                p.config, p.model, self.validation, self.test, p.device, cached_validation=cache
            )
        counted = {"validation": len(self.validation), "test": len(self.test)}
        return replace(found, counted=counted, guessing=self._guessing())

    def _guessing(self) -> float | None:
        if self._prepared.metric is not ACCURACY:
            return None
        most = np.bincount(self.validation.labels).argmax()
        return float((self.test.labels == most).mean())

    @cached_property
    def _cache(self) -> Any:
        return self._prepared.prefix_cache(self.validation) if self._cached else None

    def _validated(self, chosen: NDArray[np.int64] | None) -> float:
        p, cache = self._prepared, self._cache
        model = p.model.classifier if cache is None else cache.upper
        return score_of(p, model, self.validation, chosen, cache)
