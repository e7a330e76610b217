"""What training asks of its records, texts and images alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn


class Records(Protocol):
    """Labelled records that can be cut into batches."""

    @property
    def labels(self) -> NDArray[np.int64]: ...

    def __len__(self) -> int: ...

    def micro_batch_indices(self, indices: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
        """Cuts the records at ``indices`` into parts of at most ``size`` that are cheap to batch."""
        ...

    def collate(self, indices: NDArray[np.int64], device: torch.device) -> dict[str, Tensor]:
        """The model's inputs in the order of its arguments, then ``labels``."""
        ...

    def middle(self, size: int) -> NDArray[np.int64]:
        """Indices of ``size`` records that stand for all."""
        ...

    def subset(self, indices: NDArray[np.int64]) -> Records: ...


def logits_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """[examples, labels]."""
    found: Tensor = model(*(value for name, value in batch.items() if name != "labels"))
    return found


def classification_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """[examples] cross entropies."""
    return F.cross_entropy(logits_of(model, batch).float(), batch["labels"], reduction="none")


def predictions(model: nn.Module, records: Records, size: int, device: torch.device) -> NDArray[np.int64]:
    """[records] predicted labels, in the order of the records, in evaluation mode and without gradients."""
    was_training = model.training
    model.eval()
    found = np.empty(len(records), dtype=np.int64)
    with torch.no_grad():
        for part in records.micro_batch_indices(np.arange(len(records)), size):
            found[part] = logits_of(model, records.collate(part, device)).argmax(1).cpu().numpy()
    model.train(was_training)
    return found


def spread(records: Records, count: int) -> NDArray[np.int64]:
    """At most ``count`` indices, evenly spread: files are often sorted by source or label."""
    return np.unique(np.linspace(0, len(records) - 1, min(count, len(records))).astype(int))
