"""What reports of a private run say: epsilon, rounded up, under a name that tells whom it protects;
and nothing that a reporter measures by itself of the machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

import torch

from quietgrad.accounting.rounding import round_up, round_up_to

FIGURES = 4  # significant, of a shown epsilon: transformers prints no more
BAR_FIGURES = BAR_DECIMALS = 3  # Lightning's bars round to the nearest of these, or of those
NO_SYSTEM_METRICS = "WANDB_X_DISABLE_STATS"
SYSTEM_METRICS = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"
# Reporters that measure the machine and cannot be told not to from here -> their callbacks of
# transformers, and loggers of Lightning.
MEASURING = {
    "clearml": ("ClearMLCallback",),
    "codecarbon": ("CodeCarbonCallback",),
    "comet_ml": ("CometCallback", "CometLogger"),
    "neptune": ("NeptuneCallback", "NeptuneLogger"),
    "swanlab": ("SwanLabCallback",),
    "trackio": ("TrackioCallback",),  # GPUs alone
}


def refuse_measuring(reporters: Iterable[Any]) -> None:
    """Refuses reporters that write down the memory and the load of the machine.

    Args:
        reporters: names, as in ``report_to``, callbacks and loggers.

    Raises:
        ValueError: with the remedy.
    """
    for one in reporters:
        kinds = {kind.__name__ for kind in type(one).__mro__}
        for name, classes in MEASURING.items():
            if name == "trackio" and not torch.cuda.is_available():
                continue
            if one == name or kinds & {*classes}:
                raise ValueError(
                    f"{name} measures the memory and the load of the machine while training runs, "
                    "which follow the sizes of the batches, and those are private; report to "
                    "'tensorboard', 'wandb' or 'mlflow', whose measurements are switched off"
                )


def spent_name(unit: str) -> str:
    """What epsilon is called in logs: it says whom it protects, where that is no record."""
    return "epsilon" if unit == "record" else f"epsilon_per_{unit}"


def shown_epsilon(epsilon: float) -> float:
    """Rounded up, also as the float32 that metrics and TensorBoard's files hold."""
    rounded = float(round_up_to(epsilon, FIGURES))
    narrow = torch.tensor(rounded)
    if float(narrow) >= epsilon:
        return rounded
    return float(torch.nextafter(narrow, torch.tensor(torch.inf)))


def epsilon_for_bars(epsilon: float) -> float:
    """Rounded up so far that no progress bar rounds it down again."""
    return float(round_up(float(round_up_to(epsilon, BAR_FIGURES)), BAR_DECIMALS))


def without_system_metrics() -> None:
    """W&B, and MLflow where it is asked to, write down every few seconds how much memory the
    process holds and how busy its devices are: both follow the sizes of the batches, which are
    private. Off for the runs of both that begin in this process from now on.

    Raises:
        ValueError: for a run that has begun with them, with the remedy.
    """
    os.environ[NO_SYSTEM_METRICS], os.environ[SYSTEM_METRICS] = "true", "false"
    run = getattr(sys.modules.get("wandb"), "run", None)
    settings = getattr(run, "settings", None)
    if settings is not None and not getattr(settings, "x_disable_stats", False):
        raise ValueError(
            "W&B's run has begun and measures the memory of the process, which follows the sizes "
            "of the batches; begin it with wandb.init(settings=wandb.Settings(x_disable_stats="
            "True)), or let the Trainer begin it"
        )
    if getattr(sys.modules.get("mlflow.tracking.fluent"), "run_id_to_system_metrics_monitor", None):
        raise ValueError(
            "MLflow's run has begun and measures the memory of the process, which follows the "
            "sizes of the batches; begin it with mlflow.start_run(log_system_metrics=False), or "
            "let the Trainer begin it"
        )
