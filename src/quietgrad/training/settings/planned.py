"""The privacy plan of a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quietgrad.noise.correlation.mixing import MixingMatrix
from quietgrad.noise.methods import IndependentNoise
from quietgrad.plan import PrivacyConfig, PrivacyPlan
from quietgrad.training.settings.config import TrainConfig
from quietgrad.training.settings.noise import noise_of
from quietgrad.training.settings.schedules import FACTORS, SchedulesTable


def build_plan(
    config: TrainConfig,
    record_ids: Sequence[bytes],
    mixing: MixingMatrix | None = None,
    record_owner: Sequence[bytes] | None = None,
) -> PrivacyPlan | None:
    """The privacy plan of a configuration; None where privacy is switched off.

    Args:
        config: what was asked for.
        record_ids: of the training records.
        mixing: a matrix found earlier, instead of solving again.
        record_owner: of the training records, where users are protected.
    """
    if not config.privacy.enabled:
        return None
    planned = privacy_config(config, mixing)
    if record_owner is None:
        return planned.build(len(record_ids), record_ids)
    return planned.build(len(record_ids), record_owner=record_owner)


def plan_of_batches(
    config: TrainConfig,
    record_ids: Sequence[bytes],
    record_owner: Sequence[bytes] | None = None,
) -> PrivacyPlan:
    """What a run without privacy takes its batches from; arguments as of ``build_plan``."""
    planned = replace(
        privacy_config(config, None, plain=True),
        target_epsilon=None,
        noise_multiplier=1.0,
        target_delta=None,
    )
    return planned.build(len(record_ids), record_owner=record_owner)


def privacy_config(
    config: TrainConfig, mixing: MixingMatrix | None, plain: bool = False
) -> PrivacyConfig:
    """What ``PrivacyConfig`` makes of a configuration.

    Args:
        config: what was asked for.
        mixing: see ``build_plan``.
        plain: with independent noise and nothing beside it, for batches without privacy.
    """
    privacy, training = config.privacy, config.training
    _require_sizes(config)
    return PrivacyConfig(
        target_epsilon=privacy.target_epsilon,
        target_delta=privacy.target_delta,
        noise_multiplier=privacy.noise_multiplier,
        max_grad_norm=privacy.max_grad_norm,
        expected_batch_size=training.expected_batch_size,
        steps=training.steps,
        epochs=training.epochs,
        schedules=config.schedules.of_run,
        phases=config.schedules.of_phases,
        clipping=config.clipping,
        noise=IndependentNoise()
        if plain
        else noise_of(config.noise, config.optimizer, privacy.max_grad_norm, mixing),
        denoising=None if plain else config.gradient_rule,
        users=config.users if config.data.user else None,
        training_loss=None if plain else config.training_loss,
        adaptive_clipping=None if plain else config.adaptive_clipping,
        performance=replace(config.performance, max_physical_batch_size=config.physical_batch_size),
        seed=training.seed,
        data_are_public=config.data.public or plain,
    )


def _require_sizes(config: TrainConfig) -> None:
    """That what a schedule is a factor on is said; the rule for what is left out knows none."""
    training, table = config.training, config.schedules
    if table == SchedulesTable():
        return
    given = next((n for n in FACTORS if getattr(table, n) is not None), "phases")
    why = f"schedules.{given}={getattr(table, given)!r}"
    if training.expected_batch_size is None:
        number = table.batch_size
        if given == "batch_size" and isinstance(number, int | float):
            why += f" (a factor; was training.expected_batch_size={number:g} meant?)"
        raise ValueError(f"{why} needs training.expected_batch_size, which is left out; give it")
    if given != "phases" and training.steps is None and training.epochs is None:
        raise ValueError(f"{why} needs training.steps or training.epochs, and both are left out")
