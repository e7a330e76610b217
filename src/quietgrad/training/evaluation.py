"""Scores of a prepared run's model on one part of its records."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from quietgrad.training.precision import precision_context
from quietgrad.training.prepare import Prepared
from quietgrad.training.tasks.records import Batches, Records, spread
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


class Evaluator:
    """Scores of a run's model on its validation and test records, which are public.

    Where training starts from cached states, so do scores of validation records: their frozen lower
    part runs once, at the first evaluation, and not once an evaluation. Test records are looked at
    once and need no cache.
    """

    def __init__(self, prepared: Prepared, cached: bool) -> None:
        """Computes nothing yet.

        Args:
            prepared: the run.
            cached: whether training starts from cached states.
        """
        self._prepared = prepared
        self._cached = cached
        every = prepared.config.training.eval_records
        self._scheduled = spread(prepared.validation, every) if every else None

    @property
    def scheduled_records(self) -> int:
        """Validation records that are looked at between steps."""
        return len(self._prepared.validation if self._scheduled is None else self._scheduled)

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
            return p.task.final_scores(
                p.config, p.model, p.validation, p.test, p.device, cached_validation=cache
            )

    @cached_property
    def _cache(self) -> Any:
        return self._prepared.prefix_cache(self._prepared.validation) if self._cached else None

    def _validated(self, chosen: NDArray[np.int64] | None) -> float:
        p, cache = self._prepared, self._cache
        model = p.model.classifier if cache is None else cache.upper
        return score_of(p, model, p.validation, chosen, cache)
