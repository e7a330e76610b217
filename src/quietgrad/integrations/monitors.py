"""Numbers that early stopping and the choice of a checkpoint may watch: those of public records,
and what was released.
"""

from __future__ import annotations

import re
from typing import Any

RELEASED = "private_training_loss"  # begins the names of what TrainingLoss releases
REMEDY = (
    "watch the validation loss of public records (free), or release an estimate with noise of its "
    "own, PrivacyConfig(training_loss=), which is logged as private_training_loss "
    "(docs/training_loss.md)"
)

OF_EVALUATIONS = ("loss", "runtime", "per_second", "preparation_time")  # ends of their names
TRAINING = {"train", "training"}
PUBLIC = {"val", "valid", "validation", "eval", "test", "dev", "public"}


def of_training(name: str) -> bool:
    """Whether a metric says by its name that it is of training records, and was not released."""
    words = set(re.split("[^a-z]+", name.lower()))
    return bool(words & TRAINING) and not words & PUBLIC and not name.startswith(RELEASED)


def refuse_watched(trainer: Any) -> None:
    """Refuses a best model, or an early stop, that hangs on a number which no evaluation of
    ``transformers.Trainer`` gives: its own error comes after the first one, and the releases before
    it.

    Raises:
        ValueError: with the remedy.
    """
    args, metric = trainer.args, trainer.args.metric_for_best_model
    callbacks = trainer.callback_handler.callbacks
    stops = any(k.__name__ == "EarlyStoppingCallback" for c in callbacks for k in type(c).__mro__)
    if stops and (metric is None or args.eval_strategy == "no"):
        raise ValueError(
            "EarlyStoppingCallback has nothing to watch, as the training loss is private; give a "
            'public eval_dataset, eval_strategy="epoch" and metric_for_best_model="eval_loss"'
        )
    name = (metric or "").removeprefix("eval_")
    if name and of_training(name):
        raise ValueError(
            f"args.metric_for_best_model={metric!r}: what is computed from training records is "
            'private, and in no log; set it to "eval_loss", of public records'
        )
    evaluating = [k for k in type(trainer).__mro__ if {"evaluate", "evaluation_loop"} & {*vars(k)}]
    plain = all(k.__module__.startswith(("quietgrad.", "transformers.")) for k in evaluating)
    if name and plain and trainer.compute_metrics is None and not name.endswith(OF_EVALUATIONS):
        raise ValueError(
            f"args.metric_for_best_model={metric!r}, and without compute_metrics= an evaluation "
            'gives eval_loss alone; set it to "eval_loss", or give compute_metrics='
        )
