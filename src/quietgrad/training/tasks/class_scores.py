"""How a classifier does on each class: accuracy hardly sees a class of one record in twenty.

Asked of validation and test records alone, which are public.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST_MATRIX = 50  # classes; what is wider nobody reads


def class_scores(
    logits: NDArray[np.float32], labels: NDArray[Any], names: Sequence[str]
) -> dict[str, Any]:
    """Precision, recall, F1 and number of records of each class, and the mean F1 of those that
    occur (macro F1); for one label a record the confusion matrix too.

    Args:
        logits: [n, classes].
        labels: [n] classes, or [n, classes] of zeros and ones; a label is given where its
            probability is above one half.
        names: of the classes.
    """
    found: dict[str, Any] = {}
    if labels.ndim == 1:
        confusion = np.zeros((len(names), len(names)), dtype=np.int64)
        np.add.at(confusion, (labels.astype(np.int64), logits.argmax(1)), 1)
        right, given = confusion.diagonal(), confusion.sum(0)
        records = confusion.sum(1)
        if len(names) <= LARGEST_MATRIX:
            found["confusion"] = confusion.tolist()  # row: the truth; column: what was said
    else:
        says, has = logits > 0, labels > 0
        right, given, records = (says & has).sum(0), says.sum(0), has.sum(0)
    precision, recall = _share(right, given), _share(right, records)
    f1 = _share(2 * right, given + records)
    occurs = (given + records) > 0
    return {
        "macro_f1": float(f1[occurs].mean()) if occurs.any() else 0.0,
        "classes": {
            name: {
                "records": int(records[i]),
                "precision": float(precision[i]),
                "recall": float(recall[i]),
                "f1": float(f1[i]),
            }
            for i, name in enumerate(names)
        },
        **found,
    }


def _share(part: NDArray[Any], whole: NDArray[Any]) -> NDArray[np.float64]:
    """0 where there is nothing."""
    return np.asarray(part / np.maximum(whole, 1), dtype=np.float64)
