"""What training asks of its records, texts and images alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from quietgrad.training.tasks.splits import IGNORED

# (records done, records in all) -> nothing: how far a long job over public numbers of records is.
Told = Callable[[int, int], None]


def unheard(done: int, total: int) -> None:
    """Nobody listens."""


class Records(Protocol):
    """Labelled records that can be cut into batches."""

    @property
    def labels(self) -> NDArray[Any]:
        """[n] classes, or [n, labels] of zeros and ones."""
        ...

    def __len__(self) -> int: ...

    def micro_batch_indices(
        self, indices: NDArray[np.int64], size: int
    ) -> Iterator[NDArray[np.int64]]:
        """Cuts the records at ``indices`` into parts of at most ``size`` that
        are cheap to batch.
        """
        ...

    def collate(self, indices: NDArray[np.int64], device: torch.device) -> dict[str, Tensor]:
        """The model's inputs in the order of its arguments, then ``labels``."""
        ...

    def middle(self, size: int) -> NDArray[np.int64]:
        """Indices of ``size`` records that stand for all."""
        ...

    def subset(self, indices: NDArray[np.int64]) -> Records: ...


Kind = TypeVar("Kind", bound=Any)


class InOrder:
    """Records of one size: cut as they stand, and any stand for all."""

    def __len__(self) -> int:
        raise NotImplementedError

    def micro_batch_indices(
        self, indices: NDArray[np.int64], size: int
    ) -> Iterator[NDArray[np.int64]]:
        """See ``Records``."""
        for start in range(0, len(indices), size):
            yield indices[start : start + size]

    def middle(self, size: int) -> NDArray[np.int64]:
        """See ``Records``."""
        return np.arange(min(size, len(self)))


class ByLength:
    """Rows of token ids: cut after sorting by length, so that little is padding; those of median
    length stand for all.
    """

    ids: tuple[NDArray[np.int64], ...]

    def __len__(self) -> int:
        return len(self.ids)

    def micro_batch_indices(
        self, indices: NDArray[np.int64], size: int
    ) -> Iterator[NDArray[np.int64]]:
        """See ``Records``."""
        order = indices[np.argsort([len(self.ids[i]) for i in indices], kind="stable")]
        for start in range(0, len(order), size):
            yield order[start : start + size]

    def middle(self, size: int) -> NDArray[np.int64]:
        """See ``Records``."""
        order = np.argsort([len(row) for row in self.ids], kind="stable")
        return order[max(0, (len(order) - size) // 2) :][:size]


def padded(rows: Sequence[NDArray[np.int64]], value: int, shortest: int = 1) -> Tensor:
    """[rows, longest], filled up with ``value``; ``shortest`` is the length for no rows."""
    found = torch.full((len(rows), max(map(len, rows), default=shortest)), value)
    for padded_row, row in zip(found, rows, strict=True):
        padded_row[: len(row)] = torch.from_numpy(row)
    return found


def logits_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """[examples, labels]."""
    found: Tensor = model(*(value for name, value in batch.items() if name != "labels"))
    return found


def classification_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """[examples] cross entropies; where a record has several labels, the mean over labels of their
    binary ones; 0 for a record that is ignored.
    """
    logits, labels = logits_of(model, batch).float(), batch["labels"]
    if labels.dim() == 2:
        losses = F.binary_cross_entropy_with_logits(
            logits, labels.float().clamp_min(0), reduction="none"
        ).mean(1)
        return losses * (labels >= 0).all(1)
    return F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)


class Batches(Protocol):
    """Records as they are, or what is cached of them."""

    def collate(self, indices: NDArray[np.int64], device: torch.device) -> dict[str, Tensor]: ...


def outputs(
    model: nn.Module,
    records: Records,
    size: int,
    device: torch.device,
    chosen: NDArray[np.int64] | None = None,
    source: Batches | None = None,
) -> NDArray[np.float32]:
    """[records, labels] logits in the order of the records, in evaluation mode and without
    gradients.

    Args:
        model: the classifier, or what goes on from cached states.
        records: what is evaluated.
        size: of a batch.
        device: where the model is.
        chosen: indices of some records; None: all.
        source: cached states of the same records.
    """
    was_training = model.training
    model.eval()
    wanted = np.arange(len(records)) if chosen is None else chosen
    rows: dict[int, Tensor] = {}
    with torch.no_grad():
        for part in records.micro_batch_indices(wanted, size):
            logits = logits_of(model, (source or records).collate(part, device)).float().cpu()
            rows |= dict(zip(part.tolist(), logits, strict=True))
    model.train(was_training)
    return torch.stack([rows[int(i)] for i in wanted]).numpy()


def predictions(
    model: nn.Module, records: Records, size: int, device: torch.device
) -> NDArray[np.int64]:
    """[records] predicted labels, in the order of the records."""
    return outputs(model, records, size, device).argmax(1)


def distinct(records: Records) -> NDArray[np.int64]:
    """Indices of the records whose input no earlier one has, as the model sees it: cut short, many
    copies of a message are one. Cost: each is collated alone.
    """
    first: dict[bytes, int] = {}
    for i in range(len(records)):
        inputs = records.collate(np.array([i]), torch.device("cpu"))
        digest = hashlib.blake2b(digest_size=16)
        for name, value in inputs.items():
            if name != "labels":
                digest.update(
                    name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes()
                )
        first.setdefault(digest.digest(), i)
    return np.array(list(first.values()), dtype=np.int64)


def once(records: Kind) -> Kind:
    """The records without those whose input an earlier one has (``distinct``)."""
    kept = distinct(records)
    return records if len(kept) == len(records) else records.subset(kept)


def spread(records: Sized, count: int) -> NDArray[np.int64]:
    """At most ``count`` indices, evenly spread: files are often sorted by source or label."""
    return np.unique(np.linspace(0, len(records) - 1, min(count, len(records))).astype(int))
