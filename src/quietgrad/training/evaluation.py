"""Scores of a prepared run's model on one part of its records."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import nn

from quietgrad.training.precision import precision_context
from quietgrad.training.prepare import Prepared
from quietgrad.training.tasks.records import Batches, Records
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


def final_scores(prepared: Prepared) -> FinalScores:
    """What a finished run reports of its test and validation records, which are public."""
    p = prepared
    with precision_context(p.config, p.device):
        return p.task.final_scores(p.config, p.model, p.validation, p.test, p.device)
