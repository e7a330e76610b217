"""The training data as the Trainer was given them, and the run's loader as it walks through it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from quietgrad.loading.batches import LoadedBatch
from quietgrad.loading.loader import PrivateLoader
from quietgrad.loading.reading import require_by_number
from quietgrad.plan import PrivateRun

# Of a DataLoader: what is read with, and not what is drawn.
READING = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
    "timeout",
    "worker_init_fn",
)


@dataclass(frozen=True)
class TrainingData:
    """Records, and how they are read.

    Attributes:
        dataset: records by number.
        at_once: most records a forward pass; None where nothing is said.
        options: of DataLoader.
    """

    dataset: Any
    at_once: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


def training_data(given: Any) -> TrainingData:
    """What a Trainer was given to train on: a data set, or a DataLoader of one, whose batches are
    drawn anew: its ``batch_size`` is how many records are read at once.

    Raises:
        TypeError, ValueError: for several loaders, streams, and samplers with a law of their own,
            with the remedy.
    """
    several = given.values() if isinstance(given, Mapping) else given
    if isinstance(given, CombinedLoader) or (
        isinstance(given, list | tuple | Mapping)
        and any(isinstance(one, DataLoader) for one in several)
    ):
        raise TypeError(
            "several training loaders: a private step is one Poisson batch of one data set; "
            "concatenate them (torch.utils.data.ConcatDataset)"
        )
    if not isinstance(given, DataLoader):
        _require_records(given)
        return TrainingData(given)
    _require_records(given.dataset)
    sampler = given.sampler
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(given.dataset)  # type: ignore[arg-type]
    )
    if given.batch_size is None or type(given.batch_sampler) is not BatchSampler or not plain:
        raise ValueError(
            f"the DataLoader draws by {type(given.batch_sampler or sampler).__name__} over "
            f"{type(sampler).__name__}: batches are Poisson samples, every record by a coin of its "
            "own, and no epsilon covers another law; leave sampler and batch_sampler out"
        )
    if given.drop_last:
        raise ValueError(
            "the DataLoader has drop_last=True: a small batch must be released like any other; "
            "leave it out"
        )
    options = {name: getattr(given, name) for name in READING}
    return TrainingData(given.dataset, given.batch_size, options)


def _require_records(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise TypeError(
            f"the training data are of type {type(dataset).__name__}, a stream: Poisson sampling "
            "draws every record by a coin of its own, which needs a map-style data set "
            "(list(stream), or datasets.Dataset)"
        )
    require_by_number(dataset)


class EpochLoader:
    """Stands where the Trainer's own training loader would: an epoch a pass, one item a batch of
    the run, read in micro-batches. The first pass of a resumed run is what was left of its epoch.

    Args:
        data: what is trained on.
        steps: of a whole epoch.
    """

    def __init__(self, data: TrainingData, steps: int) -> None:
        self.data = data
        self._whole = steps
        self._run: PrivateRun | None = None
        self._pinned = False
        self._loader: tuple[int, PrivateLoader] | None = None

    def open(self, run: PrivateRun, on_cpu: bool) -> None:
        """Reads for a run from now on."""
        self._run, self._pinned = run, not on_cpu

    def close(self) -> None:
        """Lets go of the loader, and so of workers that stay."""
        self._run = self._loader = None

    def __len__(self) -> int:
        """Steps of a whole epoch, also where the plan ends or a run goes on within it."""
        return self._whole

    def __iter__(self) -> Iterator[LoadedBatch]:
        # Nothing happens before the first batch is asked for: the Trainer makes iterators early.
        if self._run is None or self._run.released >= self._run.plan.steps:
            return
        steps = self._whole - self._run.released % self._whole
        if self._loader is None or self._loader[0] != steps:
            options = dict(self.data.options)
            if not self._pinned:
                options.pop("pin_memory", None)
            loader = self._run.loader(
                self.data.dataset, steps=steps, physical_batch_size=self.data.at_once, **options
            )
            self._loader = steps, loader
        yield from self._loader[1]

    def state_dict(self) -> dict[str, Any]:
        """Nothing: where a run goes on is in its ledger."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """There is none. The Trainer takes loaders with it for ones that can go on."""
