"""Where a resumed run is, in the Trainer's counters: they count releases."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch.loops.fit_loop import RestartStage as EpochStage
from lightning.pytorch.loops.training_epoch_loop import RestartStage as BatchStage


def count_releases(trainer: Any, released: int, per_epoch: int) -> None:
    """Sets the Trainer's counters to where the ledger is, as a checkpoint that was written at the
    end of that batch would have.

    Args:
        trainer: that is about to begin its first epoch of this fit.
        released: steps that are made, or lost.
        per_epoch: steps of an epoch.
    """
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    epochs, within = divmod(released, per_epoch)
    begun = int(within > 0)  # an epoch that is under way
    for count in (fit.epoch_progress.total, fit.epoch_progress.current):
        count.ready = count.started = epochs + begun
        count.processed = count.completed = epochs
    batches, steps = loop.batch_progress, loop.automatic_optimization.optim_progress.optimizer
    for name, number in (("total", released), ("current", within)):
        for count in (getattr(batches, name), getattr(steps.step, name)):
            count.ready = count.completed = number
        batch = getattr(batches, name)
        batch.started = batch.processed = number
    batches.is_last_batch = False
    loop._batches_that_stepped = released
    # Within an epoch the Trainer restarts and keeps its counters; between two it begins one.
    fit._restarting = loop._restarting = bool(begun)
    fit.reset_restart_stage()
    loop.reset_restart_stage()
    if begun:
        fit._restart_stage = EpochStage.RESTARTED_MID_EPOCH
        loop._restart_stage = BatchStage.RESTARTED_ON_TRAIN_BATCH_END
        # What that stage is: the batch is done up to its very end, which the Trainer then counts.
        batches.total.completed -= 1
        batches.current.completed -= 1
        loop._batches_that_stepped -= 1


def move_schedules(trainer: Any, seen: int, released: int, per_epoch: int) -> None:
    """Moves learning rates on over steps that were lost since the checkpoint.

    Args:
        trainer: with the checkpoint's schedules.
        seen: releases that the checkpoint's weights have seen.
        released: that the ledger counts.
        per_epoch: steps of an epoch.
    """
    with warnings.catch_warnings():  # that the optimiser took no step between is so
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau:  # of a score, which lost steps have none of
                continue
            each = config.frequency
            for step in range(seen, released):
                if config.interval == "step":
                    due = (step % per_epoch + 1) % each == 0
                else:
                    due = (step + 1) % (per_epoch * each) == 0
                if due:
                    config.scheduler.step()
