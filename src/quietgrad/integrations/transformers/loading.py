"""The run's loader as the Trainer walks through it: an epoch a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from quietgrad.loading.batches import LoadedBatch
from quietgrad.loading.loader import PrivateLoader
from quietgrad.plan import PrivateRun

# Settings of accelerate's loader, which is not used -> their defaults.
NOT_USED = {
    "split_batches": False,
    "dispatch_batches": None,
    "even_batches": True,
    "use_seedable_sampler": True,
}


def refuse_other_draws(args: Any) -> None:
    """Refuses settings that say which records are drawn, and how they are dealt out: they would
    have no effect, as the run draws each by a coin of its own.

    Raises:
        ValueError: naming the setting, and the remedy.
    """
    if getattr(args, "data_seed", None) is not None:
        raise ValueError(
            f"args.data_seed={args.data_seed}: no batch follows from it, as which records are "
            "drawn stays secret; leave it out (of public data PrivacyConfig(seed=) repeats a run)"
        )
    config = getattr(args, "accelerator_config", None)
    for name, default in NOT_USED.items():
        value = getattr(config, name, default)
        if value != default:
            raise ValueError(
                f"args.accelerator_config: {name}={value!r} would have no effect, as the batches "
                "are the run's, not those of accelerate's loader; leave it out"
            )


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
