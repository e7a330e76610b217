"""What callbacks and schedules watch, looked at before a run begins: a number that nobody logs
would end training in its first epoch, after its releases.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from quietgrad.events import unit_of
from quietgrad.integrations.monitors import RELEASED, REMEDY, of_training
from quietgrad.integrations.reporting import spent_name
from quietgrad.plan import PrivacyPlan

PACKAGES = ("lightning", "pytorch_lightning")  # one library under two names


def is_of(one: Any, kind: type) -> bool:
    """Whether a callback or profiler is of one of Lightning's kinds, or of its twin in the package
    of the older name, which a Trainer takes, too.
    """
    return any(
        base.__name__ == kind.__name__ and base.__module__.split(".")[0] in PACKAGES
        for base in type(one).__mro__
    )


def watched(trainer: Any, plan: PrivacyPlan, insisting: bool = True) -> list[tuple[str, str]]:
    """Who watches which metric that the run does not log itself.

    Args:
        insisting: those alone that end training where it is not logged.
    """
    found = [
        (type(one).__name__, one.monitor)
        for one in trainer.callbacks
        if (is_of(one, EarlyStopping) and (one.strict or not insisting))
        or (is_of(one, ModelCheckpoint) and one.save_top_k != 0)
    ]
    found += [
        (type(config.scheduler).__name__, config.monitor)
        for config in trainer.lr_scheduler_configs
        if config.reduce_on_plateau and (config.strict or not insisting)
    ]
    own = _logged_by_run(plan)
    return [
        (who, name)
        for who, name in found
        if name is not None and name not in own and not name.startswith(RELEASED)
    ]


def _logged_by_run(plan: PrivacyPlan) -> tuple[str, ...]:
    return ("epoch", "step", spent_name(unit_of(plan.neighbouring)), "data_declared_public")


def will_be_tried(trainer: Any) -> bool:
    """Whether Lightning's sanity check shows what validation logs before training."""
    return trainer.enable_validation and trainer.num_sanity_val_steps > 0 and not trainer.ckpt_path


def refuse_private(trainer: Any, plan: PrivacyPlan) -> None:
    """Refuses metrics of training records, and all where there is no validation.

    Raises:
        ValueError: with the remedy.
    """
    for who, name in watched(trainer, plan, insisting=False):
        if of_training(name):
            raise ValueError(
                f"{who}(monitor={name!r}): what is computed from training records is private, and "
                f"in no log; {REMEDY}"
            )
    _refuse_too_early(trainer, plan)
    for who, name in watched(trainer, plan):
        if not trainer.enable_validation:
            raise ValueError(
                f"{who}(monitor={name!r}): only validation logs metrics, and there is none; give "
                f"fit a loader of public records, and log {name!r} in validation_step"
            )


def _refuse_too_early(trainer: Any, plan: PrivacyPlan) -> None:
    """Refuses schedules that look after a step for what is logged later: the first step, and its
    release, would be the last.
    """
    for config in trainer.lr_scheduler_configs:
        if not (config.reduce_on_plateau and config.strict and config.interval == "step"):
            continue
        released = config.monitor in _logged_by_run(plan) or config.monitor.startswith(RELEASED)
        first = _first_validation(trainer, plan.sampler.steps_per_epoch)
        if released or (trainer.enable_validation and config.frequency < first):
            when = "at ends of epochs" if released else f"after {first} steps at first"
            raise ValueError(
                f"{type(config.scheduler).__name__}(monitor={config.monitor!r}) with "
                f'interval="step" and frequency={config.frequency}: that is logged {when}; set '
                'interval="epoch"'
                + ("" if released else f", or Trainer(val_check_interval={config.frequency})")
            )


def _first_validation(trainer: Any, steps_per_epoch: int) -> int:
    """Steps before the first validation; 0 where it is a matter of time."""
    interval = trainer.val_check_interval
    if isinstance(interval, float):
        interval = max(1, int(steps_per_epoch * interval))
    if not isinstance(interval, int):
        return 0
    return ((trainer.check_val_every_n_epoch or 1) - 1) * steps_per_epoch + interval


def refuse_unlogged(trainer: Any, plan: PrivacyPlan) -> None:
    """After the sanity check: refuses what validation did not log.

    Raises:
        ValueError: with the remedy.
    """
    logged = sorted(trainer.callback_metrics)
    for who, name in watched(trainer, plan):
        if logged and name not in logged:
            raise ValueError(
                f"{who}(monitor={name!r}): validation logs {', '.join(logged)} alone; {REMEDY} (if "
                "it is logged, but not in the sanity check: Trainer(num_sanity_val_steps=0))"
            )
