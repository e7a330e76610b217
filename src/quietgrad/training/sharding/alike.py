"""Settings that the processes of a command compare, before any of them reads records."""

from __future__ import annotations

from typing import Any

from quietgrad.training.settings.config import TrainConfig

REMEDY = "start every process with the same CONFIG and the same --set"
# A machine's own folders and devices; what they hold is compared. A seed is, at the start.
OWN = {
    "data": ("source", "test_source"),
    "model": ("name", "weights"),
    "training": ("run_dir", "device", "tensorboard", "seed"),
}


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """By their names in a file."""
    return {
        f"{table}.{key}": value
        for table, values in config.to_dict().items()
        for key, value in values.items()
        if table != "spectrum" and key not in OWN.get(table, ())
    }
