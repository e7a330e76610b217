"""A configuration whose unset settings have become values, and why each is what it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from quietgrad.checks import default_delta
from quietgrad.training.derived.rule import (
    MU_WITHOUT_EPSILON,
    STEPS,
    PublicFacts,
    Reads,
    Trained,
    batch_and_steps,
    mu_of,
    mu_of_noise,
    rates,
)
from quietgrad.training.optimizers import AdamW
from quietgrad.training.settings.config import TrainConfig
from quietgrad.training.settings.schedules import SchedulesTable
from quietgrad.training.sources.hub import TORCHVISION
from quietgrad.training.tasks.images.models import RANDOM_FEATURES, SMALL_CNN, VGG
from quietgrad.training.tasks.loaded import Tune
from quietgrad.training.tasks.tables.models import PREFIX as TABLE

SHARE_OF_HOURS = 0.8  # that steps may take; evaluations, and a busier machine, have the rest
Reasons = Mapping[str, str]
OWN_MODELS = (SMALL_CNN, VGG)


@dataclass(frozen=True)
class Machine:
    """What this machine and this model are, measured on public records.

    Attributes:
        seconds: of clipping, for one record (a user's records).
        before: seconds before the first step.
        parameters: numbers that train.
        head_input: see ``PublicFacts``.
    """

    seconds: float = 0.0
    before: float = 0.0
    parameters: int = 1
    head_input: Reads | None = None

    def examples_in(self, hours: float) -> float:
        """How many records steps can take in so many hours; at least one."""
        left = SHARE_OF_HOURS * 3600 * hours - self.before
        return max(1.0, left / self.seconds) if self.seconds else math.inf


def with_what_trains(config: TrainConfig) -> TrainConfig:
    """``model.tune`` said, by what the model is and by what else is said of it."""
    if config.model.tune is not None:
        return config
    return replace(config, model=replace(config.model, tune=_what_trains(config)[0]))


def why_it_trains(config: TrainConfig) -> str | None:
    """Why what trains was chosen; None where it is given."""
    return _what_trains(config)[1] if config.model.tune is None else None


def _what_trains(config: TrainConfig) -> tuple[Tune, str]:
    model = config.model
    if model.train_layers:
        return "full", "model.train_layers is given"
    if model.says_adapters:
        return "lora", "another key of [model] is about what lies below the head"
    if config.task.kind == "generate":
        return "lora", "there is no head to train alone, and adapters are the least there is"
    if model.name == RANDOM_FEATURES:
        return "head", "random features do not train"
    if model.name.startswith(TABLE) or model.name in OWN_MODELS:
        return "full", "nothing of the model is pretrained"
    if model.name.startswith(TORCHVISION):
        return "head", "least time and least noise"
    return "head", "least time and least noise; 'lora' learns more from many records"


def is_open(config: TrainConfig) -> bool:
    """Whether a setting is left out that the rule knows."""
    return config.optimizer.learning_rate is None or bool(_open_sizes(config))


def _open_sizes(config: TrainConfig) -> list[str]:
    training = config.training
    if config.schedules != SchedulesTable():  # relative to sizes that have to be said
        return []
    sizes = ["expected_batch_size"] if training.expected_batch_size is None else []
    return [*sizes, "steps"] if training.steps is None and training.epochs is None else sizes


def resolved(
    config: TrainConfig, units: int, machine: Machine | None = None
) -> tuple[TrainConfig, Reasons]:
    """Every setting that the rule knows, explicit; those given stay.

    Args:
        config: what was asked for; what trains is said.
        units: N, training records or users.
        machine: None before the model is loaded: sizes as if the hours were enough, and rates that
            mean nothing yet.

    Returns:
        The configuration, and "table.key" -> why, of what was left out.

    Raises:
        ValueError: where a rate is left out that the rule does not know.
    """
    known = machine or Machine()
    training, optimizer = config.training, config.optimizer
    if optimizer.learning_rate is None and not isinstance(optimizer, AdamW):
        raise ValueError(
            "optimizer.learning_rate is left out, and the rule for it is AdamW's alone; give it, "
            "or set optimizer.name = 'adamw'"
        )
    facts = PublicFacts(
        units,
        _mu(config, units),
        _trained(config),
        known.parameters,
        known.head_input,
        known.examples_in(training.hours),
    )
    reasons: dict[str, str] = {}
    open_sizes = _open_sizes(config)
    batch, steps = training.expected_batch_size, training.steps
    if open_sizes:
        batch, steps = batch_and_steps(facts, batch, steps, training.epochs)
        training = replace(training, expected_batch_size=batch)
        if training.epochs is None:
            training = replace(training, steps=steps)
        reasons |= {f"training.{name}": _why(facts, name, batch * steps) for name in open_sizes}
    if optimizer.learning_rate is None:
        batch = batch or units  # phases without a batch size are refused by the plan
        steps = steps or max(1, round((training.epochs or 1) * units / batch))
        rate, head = rates(facts, batch, steps)
        reasons["optimizer.learning_rate"] = _why_rate(facts)
        if head is not None and optimizer.head_learning_rate is None:
            optimizer = replace(optimizer, head_learning_rate=head)
            reasons["optimizer.head_learning_rate"] = _why_rate(replace(facts, trained="head"))
        optimizer = replace(optimizer, learning_rate=rate)
    return replace(config, training=training, optimizer=optimizer), reasons


def _mu(config: TrainConfig, units: int) -> float:
    """The budget. A run without privacy that names an epsilon is that run's reference."""
    privacy, training = config.privacy, config.training
    if privacy.target_epsilon is not None and privacy.target_epsilon > 0:
        delta = privacy.target_delta
        if delta is None or not 0 < delta < 1:  # the plan refuses such
            delta = default_delta(units)
        return mu_of(privacy.target_epsilon, delta)
    batch, steps = training.expected_batch_size, training.steps
    if privacy.noise_multiplier and batch and steps:
        return mu_of_noise(privacy.noise_multiplier, min(1.0, batch / units), steps)
    return MU_WITHOUT_EPSILON


def _trained(config: TrainConfig) -> Trained:
    model = config.model
    if model.tune in ("head", "lora"):
        return "head" if model.tune == "head" else "adapters"
    new = model.name.startswith(TABLE) or (model.name in OWN_MODELS and not model.weights)
    return "new" if new else "pretrained"


def _why(facts: PublicFacts, name: str, examples: int) -> str:
    limited = examples > 0.9 * facts.examples
    if name == "steps":
        hours = ", as far as the hours allow" if limited else ""
        return f"{STEPS[facts.trained]} are enough for {SAID[facts.trained]}{hours}"
    more = "would exceed the hours" if limited else "would hardly lessen the noise"
    return (
        f"from N = {facts.units:,}, epsilon and delta (mu = {facts.mu:.2g}) and the steps; a "
        f"larger one {more}"
    )


SAID: Mapping[Trained, str] = {
    "head": "a head alone",
    "adapters": "adapters of a pretrained model",
    "pretrained": "a pretrained model's own weights",
    "new": "a network that begins at random",
}


def _why_rate(facts: PublicFacts) -> str:
    reads = facts.head_input
    read = "" if reads is None else f" that reads inputs of length {reads.length:.3g}"
    which = f"a head{read}" if facts.trained == "head" else SAID[facts.trained]
    return f"of AdamW for {which}, by the steps and what they say over their noise"
