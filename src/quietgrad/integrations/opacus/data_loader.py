"""The private data loader as the loop sees it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from quietgrad.generators import KeyedWorker
from quietgrad.integrations.opacus.absent import absent
from quietgrad.integrations.opacus.collating import BagPlaces, CollateRows
from quietgrad.integrations.opacus.following.tracing import Tape
from quietgrad.integrations.opacus.source import BatchSource, Indices
from quietgrad.loading.reading import one_by_one, require_records_apart
from quietgrad.loading.repeated import require_each_once
from quietgrad.loading.unsaid import say_no_lengths, say_no_sizes
from quietgrad.tensors import map_tensors


class PoissonBatches(Sampler[list[int]]):
    """Index lists of a pass for torch's DataLoader, empty ones too.

    Attributes:
        sample_rate: q.
        steps: numbers of the batches of the pass.
    """

    def __init__(self, source: BatchSource, most: int | None) -> None:
        self.sample_rate = source.sampler.sample_rate
        self.num_samples = source.sampler.dataset_size
        self.steps = range(0)
        self._source = source
        self._most = most

    def cut(self, indices: Indices) -> list[Indices]:
        """A batch in micro-batches of about the same size; an empty one is one of them."""
        parts = 1 if self._most is None else max(1, -(-len(indices) // self._most))
        return list(np.array_split(indices, parts))

    def __len__(self) -> int:
        steps = self._source.sampler.steps_per_epoch
        if self._most is None:
            return steps
        return -(-steps * round(self.sample_rate * self.num_samples) // self._most)

    def __iter__(self) -> Iterator[list[int]]:
        for number in self.steps:
            for part in self.cut(self._source.indices(number)):
                yield part.tolist()


class DPDataLoader(DataLoader[Any]):
    """Poisson batches where the given loader had shuffled ones: of the same records, through the
    same workers, an epoch a pass. A batch's size is random and private, and may be zero.

    Args:
        data_loader: whose data set, collate_fn and workers are used.
        source: draws the batches.
        most: most records of a micro-batch; None: batches come whole.
    """

    def __init__(
        self, data_loader: DataLoader[Any], source: BatchSource, most: int | None = None
    ) -> None:
        collate, begin = data_loader.collate_fn, data_loader.worker_init_fn
        if data_loader.num_workers and not isinstance(begin, KeyedWorker):
            begin = KeyedWorker(begin)
        if not isinstance(collate, CollateRows):
            dim = 0 if source.batch_first else 1
            collate = CollateRows(collate, data_loader.dataset, dim)
        self._bags = collate.bags
        self._looked_at = False
        self.source = source
        self._batches = PoissonBatches(source, most)
        super().__init__(
            data_loader.dataset,
            batch_sampler=self._batches,
            collate_fn=collate,
            num_workers=data_loader.num_workers,
            pin_memory=data_loader.pin_memory,
            timeout=data_loader.timeout,
            worker_init_fn=begin,
            multiprocessing_context=data_loader.multiprocessing_context,
            generator=torch.Generator().manual_seed(source.seed("workers")),
            prefetch_factor=data_loader.prefetch_factor,
            persistent_workers=data_loader.persistent_workers,
        )

    @classmethod
    def from_data_loader(cls, data_loader: DataLoader[Any], **_: Any) -> DPDataLoader:
        """Refused: a loader alone has nobody who counts what is released of its batches.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "DPDataLoader.from_data_loader makes a loader that no accountant knows of; let "
            "PrivacyEngine.make_private build model, optimiser and loader together"
        )

    @property
    def sample_rate(self) -> float:
        """q, of a record in a batch."""
        return self.source.sampler.sample_rate

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Raises:
        RuntimeError: if a batch was not stepped on before the next is asked for.
        ValueError: where a record follows from what was read before it.
        """
        say_no_lengths()
        say_no_sizes()  # where the loop calls model and loss
        source = self.source
        if not self._looked_at:
            require_each_once(self.dataset)
            require_records_apart(self.dataset)
            self._looked_at = True
        this_pass = source.begin_pass()
        training = source.training
        first = source.number if training else 0
        self._batches.steps = range(first, first + source.sampler.steps_per_epoch)
        reader = super().__iter__()
        try:
            yield from self._batches_of(reader, this_pass, training)
        finally:
            if source.passes == this_pass:
                source.give_back()  # also where the loop breaks off
        if training:
            source.finish()

    def _get_iterator(self) -> Any:
        """Of records that are asked for one at a time, though ``dataset`` is the script's own."""
        reader = copy.copy(self)
        vars(reader)["dataset"] = one_by_one(self.dataset)
        return DataLoader._get_iterator(reader)

    def _batches_of(self, reader: Iterator[Any], this_pass: int, training: bool) -> Iterator[Any]:
        source = self.source
        for number in self._batches.steps:
            parts = self._batches.cut(source.indices(number))
            for i, part in enumerate(parts):
                if source.passes != this_pass:
                    raise RuntimeError(
                        "another pass over the private data loader began before this one was over, "
                        "and has taken the batches that come now; finish or leave one loop "
                        "before the next begins"
                    )
                with source.reading(number):
                    records = next(reader)
                if not training:  # a look at records: nothing is released of it
                    look = Tape(len(part), source.batch_first)
                    records = look.enter(records, self._bags)
                    source.close(look)
                    yield records
                    continue
                tape = source.open(number, len(part), i == 0, i + 1 == len(parts))
                _require_rows(records, tape, self._bags)
                yield tape.enter(records, self._bags)


def _require_rows(records: Any, tape: Tape, places: BagPlaces | None) -> None:
    def one(t: Any) -> Any:
        # This dimension and no other: one that is as long by chance would make records of its own.
        dim = 0 if tape.batch_first or t.dim() < 2 else 1
        if t.dim() <= dim or t.shape[dim] != tape.records:
            raise ValueError(
                f"collate_fn returned a tensor without one row a record in dimension {dim}; keep "
                "every record, also a bad one, and put what is common to all of them into the "
                "model or the loop (records in dimension 1: make_private(batch_first=False); words "
                "of an EmbeddingBag: flat ids in one tensor, and offsets that begin at 0 and say "
                "where each record's begin, or ids padded to one row a record and padding_idx=)"
            )
        return t

    map_tensors(records if places is None else places.as_rows(records), one)


_BY_THE_LOADER = "the loader of make_private itself makes empty batches, and draws; leave it out"
__getattr__ = absent(
    __name__,
    dict.fromkeys(
        (
            "CollateFnWithEmpty",
            "dtype_safe",
            "shape_safe",
            "switch_generator",
            "wrap_collate_with_empty",
        ),
        _BY_THE_LOADER,
    ),
)
