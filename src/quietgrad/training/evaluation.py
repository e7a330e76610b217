"""Scores of a prepared run's model on one part of its records."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import nn

from quietgrad.training.generation import answer_scores, decoded_score
from quietgrad.training.pairs import TokenisedPairs
from quietgrad.training.prepare import Prepared, precision_context
from quietgrad.training.records import Batches, Records, outputs


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
        if isinstance(records, TokenisedPairs):
            return answer_scores(model, records, prepared.evaluation_batch, prepared.device, chosen).token_accuracy
        found = outputs(model, records, prepared.evaluation_batch, prepared.device, chosen, source)
    return prepared.metric(found, records.labels if chosen is None else records.labels[chosen])


def final_metrics(prepared: Prepared) -> dict[str, float]:
    """What a finished run reports of its test and validation records, which are public."""
    model, key = prepared.model.classifier, prepared.metric.key
    if not isinstance(prepared.test, TokenisedPairs):
        return {
            key: score_of(prepared, model, prepared.test),
            f"validation_{key}": score_of(prepared, model, prepared.validation),
        }
    found: dict[str, float] = {}
    task = prepared.config.task
    with precision_context(prepared.config, prepared.device):
        for prefix, part in (("", prepared.test), ("validation_", prepared.validation)):
            assert isinstance(part, TokenisedPairs)
            scores = answer_scores(model, part, prepared.evaluation_batch, prepared.device)
            found |= {f"{prefix}{key}": scores.token_accuracy, f"{prefix}perplexity": scores.perplexity}
        if task.decoded != "none":
            chosen = np.unique(
                np.linspace(0, len(prepared.test) - 1, min(task.decoded_records, len(prepared.test))).astype(int)
            )
            found[task.decoded] = decoded_score(
                task.decoded, model, prepared.model.tokenizer, prepared.test, chosen, task.max_answer_length
            )
    return found
