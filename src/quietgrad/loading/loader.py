"""Batches of a run, read by torch's DataLoader: workers, pinned memory and prefetching are its own;
which records are read, and when a batch is whole, is the run's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from quietgrad.checks import SettingsWarning, require_at_least, require_int
from quietgrad.clipping.bound import BoundClipper
from quietgrad.clipping.clipper import Clipper
from quietgrad.clipping.soundness.kept.lazily import as_before
from quietgrad.generators import KeyedByStep, KeyedWorker
from quietgrad.loading.batches import LoadedBatch, MicroBatch
from quietgrad.loading.draws import (
    CollateNumbered,
    Draws,
    Indices,
    Numbered,
    PhysicalBatches,
)
from quietgrad.loading.padding import PaddingLooks
from quietgrad.loading.reading import one_by_one, require_by_number, require_records_apart
from quietgrad.loading.repeated import require_each_once
from quietgrad.loading.unsaid import say_no_lengths, say_no_sizes
from quietgrad.loading.workers import let_go_of_dead_workers
from quietgrad.sampling.poisson import PoissonSampler
from quietgrad.sampling.users import UserIndices
from quietgrad.tensors import Batch, batch_size_of, map_tensors, to_device

# Options of DataLoader that are the run's to decide, and why.
NOT_YOURS = {
    "batch_size": "the sampling rate of the plan decides how large a batch is; the most records a "
    "forward pass is physical_batch_size",
    "shuffle": "batches are Poisson samples: every record has a coin of its own",
    "sampler": "batches are drawn by the plan's sampler, which is what is accounted for",
    "batch_sampler": "batches are drawn by the plan's sampler, which is what is accounted for",
    "drop_last": "a small batch must be released like any other",
    "in_order": "micro-batches must arrive in order: they make up one batch after another",
}


RECORDS_AT_ONCE = 64  # in a forward pass, where nothing is said


class Batched(Protocol):
    """What a loader reads of a plan."""

    @property
    def sampler(self) -> PoissonSampler: ...
    @property
    def clipper(self) -> Clipper: ...
    @property
    def steps(self) -> int: ...


class BatchesOfARun(Protocol):
    """What a loader reads of a run: a ``PrivateRun``."""

    @property
    def plan(self) -> Batched: ...
    @property
    def released(self) -> int: ...
    def batches(self, steps: int | None = None) -> Iterator[Indices]: ...


class PrivateLoader:
    """What ``PrivateRun.loader`` returns. Iterated over it gives one ``LoadedBatch`` a release, for
    one epoch or a stated number of steps; again, for the next ones. A pass ends where another one
    begins. Memory: as DataLoader's, and the indices of batches read ahead.
    """

    def __init__(
        self,
        run: BatchesOfARun,
        draws: Draws,
        dataset: Any,
        steps: int | None,
        physical_batch_size: int | None,
        collate_fn: Callable[[list[Any]], Batch] | None,
        options: dict[str, Any],
        seed: Callable[[], int],
        look_again: Callable[[Any], None],
    ) -> None:
        _require_options(options)
        _require_dataset(dataset, run.plan.sampler)
        say_no_lengths()  # of what is read before the first batch, too
        say_no_sizes()
        if run.plan.sampler.users is None:
            require_each_once(dataset)
        require_records_apart(dataset)
        clipper = run.plan.clipper
        size = clipper.physical_batch_size or clipper.max_physical_batch_size or RECORDS_AT_ONCE
        size = _given("physical_batch_size", physical_batch_size, size)
        self._run = run
        self._block = physical_batch_size or 1
        self._steps = _given("steps", steps, run.plan.sampler.steps_per_epoch)
        self._views = clipper.views
        self._collate = default_collate if collate_fn is None else collate_fn
        self._dataset = dataset
        self._physical = PhysicalBatches(draws, size, clipper.views)
        self._seed, self._reads = seed, KeyedByStep()
        self._look_again = look_again
        # Workers' seeds come from the generator, and the script's may be one that anybody knows.
        options = options | {"generator": torch.Generator("cpu").manual_seed(seed())}
        if options.get("num_workers"):
            options["worker_init_fn"] = KeyedWorker(options.get("worker_init_fn"))
        records = one_by_one(dataset)
        # Torch's own collation fills nothing up.
        padded = self._collate is not default_collate
        self._looks = PaddingLooks(records, self._collate, seed) if padded else None
        self._reader: DataLoader[Any] = DataLoader(
            Numbered(records),
            batch_sampler=self._physical,
            collate_fn=CollateNumbered(self._collate),
            **options,
        )
        self.newest_pass: object = None  # whose micro-batches are clipped; no other's
        self._empty: Batch = None

    @property
    def cut(self) -> str:
        """What ranks compare: records of a block, and steps of the next pass. A rank whose pass
        ends before the others' would leave them waiting.
        """
        return f"blocks of {self._block}, {len(self)} steps"

    def __len__(self) -> int:
        """Steps of the next pass."""
        return min(self._steps, self._run.plan.steps - self._run.released)

    def __iter__(self) -> Iterator[LoadedBatch]:
        """Raises:
        RuntimeError: if a batch was not released before the next is asked for.
        """
        steps = len(self)
        if not steps:
            warnings.warn(
                f"all {self._run.plan.steps} releases of the plan are made, so this pass over the "
                "loader has no batches; loop over run.epochs(), or build a plan with more epochs",
                SettingsWarning,
                stacklevel=2,
            )
            return
        _require_dataset(self._dataset, self._run.plan.sampler)  # it may have grown since
        self._look_again(self._dataset)
        first = self._run.released
        self._physical.steps = range(first, first + steps)
        this_pass = self.newest_pass = object()
        let_go_of_dead_workers(self._reader)
        with torch.device("cpu"):  # torch draws from its generator where the default device is
            read = iter(self._reader)
        for indices in self._run.batches(steps):
            release = self._run.released
            yield LoadedBatch(self._parts(indices, release, read, this_pass), release)

    def _parts(
        self, indices: Indices, release: int, read: Iterator[Any], this_pass: object
    ) -> Iterator[MicroBatch]:
        parts = self._physical.cut(indices)
        if not parts:
            none = () if isinstance(indices, UserIndices) else None
            yield MicroBatch(self._without_records(), True, release, this_pass, none)
        for i, part in enumerate(parts, 1):
            if self.newest_pass is not this_pass:
                raise RuntimeError(
                    "another pass over the loader has begun, and this one is over: a batch is read "
                    "by one loop; go on with the newest"
                )
            with self._reads.of(release, self._seed):
                rows, records, ends = next(read)
            if rows != self._physical.rows_of(part):  # the message names none: they are private
                raise RuntimeError(
                    "the records that were read are not those of the open batch; begin another "
                    "pass over the loader, and leave its DataLoader as it is"
                )
            if batch_size_of(records) != len(rows):
                raise RuntimeError(
                    "collate_fn returned another number of rows than it was given records; it must "
                    "keep every record, also a bad one (leave bad records out of the data set), "
                    "with one row each"
                )
            if self._looks is not None:
                self._looks.note(release, rows, ends, records, first=i == 1)
            sizes = part.sizes if isinstance(part, UserIndices) else None
            yield MicroBatch(self._in_views(records), i == len(parts), release, this_pass, sizes)

    def given(
        self, parts: Iterator[Batch], bound: BoundClipper, device: torch.device
    ) -> Iterator[Batch]:
        """Micro-batches on the model's device, to be clipped one after the other.

        Raises:
            Mixes: after one, where padding changes losses (``PaddingLooks``).
        """
        for part in parts:
            yield to_device(part, device)
            if self._looks is not None:
                self._looks.look(bound, device)

    def _without_records(self) -> Batch:
        """What a batch of no records looks like: the first record's, cut to no rows."""
        if self._empty is None:
            # What collate_fn kept of this record, others would be made with.
            kept = as_before(nn.Identity(), self._collate)
            with self._reads.of(self._run.released, self._seed), kept:
                one = self._collate([self._dataset[0]] * self._views)
            self._empty = self._in_views(map_tensors(one, lambda t: t[:0]))
        return self._empty

    def _in_views(self, rows: Batch) -> Batch:
        """[records K, ...] to [records, K, ...], where a record has several views."""
        if self._views == 1:
            return rows
        return map_tensors(rows, lambda t: t.unflatten(0, (-1, self._views)))


def _require_dataset(dataset: Any, sampler: PoissonSampler) -> None:
    """Checks that records can be asked for by number, and that there are as many as planned.

    Raises:
        TypeError, ValueError: with the remedy.
    """
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "dataset is a DataLoader, which draws batches of its own; give its data set "
            "(loader.dataset): the plan's sampler draws, because its rate is what is accounted for"
        )
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        raise TypeError(
            f"dataset is a {type(dataset).__name__}, which cannot be asked for a record by its "
            "number: Poisson sampling draws every record by a coin of its own, which a stream does "
            "not allow; load it into a map-style data set (list(stream), or datasets.Dataset)"
        )
    require_by_number(dataset)
    if len(dataset) != sampler.record_count and sampler.users is not None:
        raise ValueError(  # no numbers: that of the records is private beside that of the users
            "dataset has another number of records than record_owner had entries; build the plan "
            "for these records, with one owner each"
        )
    if len(dataset) != sampler.record_count:
        raise ValueError(
            f"dataset has {len(dataset)} records, the plan is for dataset_size="
            f"{sampler.dataset_size}; "
            "build the plan for these records: the sampling rate follows from their number"
        )


def _require_options(options: dict[str, Any]) -> None:
    """Refuses what is not the caller's to decide.

    Raises:
        TypeError: naming the option and the reason.
    """
    for name in options:
        if name in NOT_YOURS:
            raise TypeError(f"{name} cannot be set: {NOT_YOURS[name]}")


def _given(name: str, value: int | None, otherwise: int) -> int:
    """A number of at least 1, or what stands for None."""
    if value is None:
        return otherwise
    require_int(name, value)
    require_at_least(name, value, 1, "it is a number of at least one")
    return value
