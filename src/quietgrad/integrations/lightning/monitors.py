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


def watched(trainer: Any, plan: PrivacyPlan) -> list[tuple[str, str]]:
    """Who watches which metric that the run does not log itself; those alone that insist on it."""
    found = [
        (type(one).__name__, one.monitor)
        for one in trainer.callbacks
        if (isinstance(one, EarlyStopping) and one.strict)
        or (isinstance(one, ModelCheckpoint) and one.save_top_k != 0)
    ]
    found += [
        (type(config.scheduler).__name__, config.monitor)
        for config in trainer.lr_scheduler_configs
        if config.reduce_on_plateau and config.strict
    ]
    own = (None, "epoch", "step", spent_name(unit_of(plan.neighbouring)), "data_declared_public")
    return [(who, name) for who, name in found if name not in own and not name.startswith(RELEASED)]


def will_be_tried(trainer: Any) -> bool:
    """Whether Lightning's sanity check shows what validation logs before training."""
    return trainer.enable_validation and trainer.num_sanity_val_steps > 0 and not trainer.ckpt_path


def refuse_private(trainer: Any, plan: PrivacyPlan) -> None:
    """Refuses metrics of training records, and all where there is no validation.

    Raises:
        ValueError: with the remedy.
    """
    for who, name in watched(trainer, plan):
        if of_training(name):
            raise ValueError(
                f"{who}(monitor={name!r}): what is computed from training records is private, and "
                f"in no log; {REMEDY}"
            )
        if not trainer.enable_validation:
            raise ValueError(
                f"{who}(monitor={name!r}): only validation logs metrics, and there is none; give "
                f"fit a loader of public records, and log {name!r} in validation_step"
            )


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
