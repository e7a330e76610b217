"""What a resumed run may change: where and how often it writes, how it uses the machine, and how
long its steps are. The guarantee and the records it is about stay.
"""

from __future__ import annotations

from dataclasses import replace

from quietgrad.training.settings.config import TrainConfig
from quietgrad.training.settings.noise import NoiseCurve

FREE = {
    "training.run_dir",
    "training.eval_every",
    "training.eval_records",
    "training.checkpoint_every",
    "training.hours",
    "training.device",
    "training.precision",
    "training.cache_frozen_layers",
    "training.sharded",
    "training.tensorboard",
    "optimizer.learning_rate",
    "optimizer.head_learning_rate",
    "optimizer.weight_decay",
    "optimizer.warmup_steps",
}
PRIVACY_TABLES = (
    "privacy",
    "noise",
    "clipping",
    "users",
    "schedules",
    "training_loss",
    "adaptive_clipping",
)
PRIVACY_KEYS = (
    "training.expected_batch_size",
    "training.steps",
    "training.epochs",
    "data.user",
)


def with_saved_choices(first: TrainConfig, now: TrainConfig) -> TrainConfig:
    """What a resume leaves out is what the run began with, not chosen anew: hours, machine and data
    may look different by now.

    Args:
        first: the run's own configuration, which is explicit.
        now: what the resume is asked for.
    """
    model, optimizer, training = now.model, now.optimizer, now.training
    if model.tune is None:
        model = replace(model, tune=first.model.tune)
    if optimizer.learning_rate is None and type(optimizer) is type(first.optimizer):
        head = optimizer.head_learning_rate
        optimizer = replace(
            optimizer,
            learning_rate=first.optimizer.learning_rate,
            head_learning_rate=first.optimizer.head_learning_rate if head is None else head,
        )
    if training.expected_batch_size is None:
        training = replace(training, expected_batch_size=first.training.expected_batch_size)
    if training.steps is None and training.epochs is None:
        training = replace(training, steps=first.training.steps, epochs=first.training.epochs)
    return replace(now, model=model, optimizer=optimizer, training=training)


def require_same_settings(first: TrainConfig, now: TrainConfig) -> None:
    """Checks that a resumed run goes on with the settings it began with.

    Raises:
        ValueError: naming the first setting that changed.
    """
    before, after = (
        {
            (table, key): value
            for table, values in config.to_dict().items()
            for key, value in values.items()
        }
        for config in (first, now)
    )
    # The rate shapes NoiseCurve's noise.
    fixed = {"optimizer.learning_rate"} if isinstance(now.noise, NoiseCurve) else set()
    every = (before.keys() | after.keys()) - {tuple(name.split(".")) for name in FREE - fixed}
    # A method first: it decides on the other keys of its table.
    for table, key in sorted(every, key=lambda name: (name[1] != "method", name)):
        was, is_now = before.get((table, key)), after.get((table, key))
        name = f"{table}.{key}"
        if was != is_now and table != "performance":
            private = table in PRIVACY_TABLES or name in PRIVACY_KEYS
            raise ValueError(
                f"resume with a changed {'privacy ' if private else ''}setting: {name} was "
                f"{was!r} and is now {is_now!r}; resume with the settings of the first start, or "
                "begin a new run directory"
            )
