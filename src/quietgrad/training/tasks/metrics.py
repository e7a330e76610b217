"""What a classifier is judged by: accuracy for one label a record, mean area under the ROC curve
for several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

Labels = NDArray[Any]


@dataclass(frozen=True)
class Metric:
    """How outputs are scored.

    Attributes:
        key: in result files.
        name: in words.
    """

    key: str
    name: str

    def __call__(self, logits: NDArray[np.float32], labels: Labels) -> float:
        """[n, labels] logits against [n] or [n, labels] labels."""
        if self is ACCURACY:
            return float((logits.argmax(1) == labels).mean())
        return mean_auc(logits, labels)


ACCURACY = Metric("accuracy", "accuracy")
MEAN_AUC = Metric("mean_auc", "mean AUC")
TOKEN_ACCURACY = Metric(
    "token_accuracy", "token accuracy"
)  # of generation.py, never called on logits
BY_KEY = {metric.key: metric for metric in (ACCURACY, MEAN_AUC, TOKEN_ACCURACY)}


def metric_for(labels: Labels) -> Metric:
    """Accuracy for [n] labels, mean AUC for [n, labels] of zeros and ones."""
    return ACCURACY if labels.ndim == 1 else MEAN_AUC


def dividing(labels: Labels) -> NDArray[np.bool_]:
    """[labels] whether some records have each of [n, labels], and some have not."""
    has = labels > 0
    return np.asarray(has.any(axis=0) & ~has.all(axis=0), dtype=np.bool_)


def mean_auc(scores: NDArray[np.float32], labels: Labels) -> float:
    """Mean over labels of the area under the ROC curve, by ranks (Mann-Whitney; ties count a half);
    labels that all or no records have are left out.

    Raises:
        ValueError: if every label is so.
    """
    areas = []
    for column in range(labels.shape[1]):
        positive = labels[:, column] > 0
        ones = int(positive.sum())
        zeros = len(positive) - ones
        if ones and zeros:
            ranks = rankdata(scores[:, column])
            areas.append((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))
    if not areas:
        raise ValueError(
            "no label divides the records, so there is no ROC curve; use more records for "
            "evaluation (training.eval_records)"
        )
    return float(np.mean(areas))
