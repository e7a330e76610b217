"""The run's loader as the Trainer walks through it: an epoch a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quietgrad.loading.batches import LoadedBatch
from quietgrad.loading.loader import PrivateLoader
from quietgrad.plan import PrivateRun


class EpochLoader:
    """Stands where the Trainer's own training loader would: one item is one batch of the run, read
    in micro-batches of the physical size. The first pass of a resumed run is what was left of its
    epoch.

    Args:
        run: whose batches they are.
        loader_of: a number of steps a pass -> a loader of the run.
    """

    def __init__(self, run: PrivateRun, loader_of: Callable[[int], PrivateLoader]) -> None:
        self._run = run
        self._loader_of = loader_of
        self._whole = run.plan.sampler.steps_per_epoch
        self._begun = run.released % self._whole  # steps of the first epoch that are made
        self._loader: tuple[int, PrivateLoader] | None = None

    def close(self) -> None:
        """Lets go of the loader, and so of workers that stay."""
        self._loader = None

    def __len__(self) -> int:
        """Steps of a whole epoch, also where the plan ends or a run goes on within it."""
        return self._whole

    def __iter__(self) -> Iterator[LoadedBatch]:
        steps, self._begun = self._whole - self._begun, 0
        if self._run.released >= self._run.plan.steps:
            return iter(())
        if self._loader is None or self._loader[0] != steps:
            self._loader = steps, self._loader_of(steps)
        return iter(self._loader[1])
