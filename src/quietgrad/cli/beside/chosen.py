"""What a run's settings are and why, and whether it fits into the hours that are allowed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from quietgrad.cli.output import print_table
from quietgrad.training.settings.overrides import default_config_path, read_toml, value_of

if TYPE_CHECKING:
    from quietgrad.training.prepare import Prepared

# What ``plan`` says of the settings that decide how well a run learns: key -> name.
SETTINGS = {
    "model.tune": "what trains",
    "optimizer.learning_rate": "learning rate",
    "optimizer.head_learning_rate": "learning rate of the head",
    "training.expected_batch_size": "expected batch size",
    "training.steps": "steps",
    "training.epochs": "epochs",
    "privacy.max_grad_norm": "clipping norm",
    "denoising.method": "denoising",
}
EMBEDDED = "as in the embedded default, which runs without a CONFIG"
# Of those that are always the same where nothing is said.
STANDING = {
    "privacy.max_grad_norm": (
        1.0,
        "AdamW takes out its scale; shorter is as good, and longer than gradients adds noise",
    ),
    "denoising.method": (
        "none",
        "no rule is better than none where each has its own best rate (docs/denoising.md)",
    ),
}


def embedded(config_path: Path | None, overrides: Sequence[str]) -> list[str]:
    """Of ``SETTINGS``, those that the embedded default says, and nobody who runs it."""
    if config_path is not None:
        return []
    default = read_toml(default_config_path())
    places = ((name, *name.split(".")) for name in SETTINGS)
    return [
        name
        for name, table, key in places
        if key in default.get(table, {}) and value_of({}, overrides, table, key, True) is None
    ]


def settings_record(prepared: Prepared, unsaid: Collection[str] = ()) -> list[dict[str, Any]]:
    """Each setting of ``SETTINGS`` with its value, and why it is that: "given", what the rule of
    docs/defaults.md went by, or of ``unsaid`` that it is the embedded default's.
    """
    told, found = prepared.config.to_dict(), []
    for name in SETTINGS:
        table, _, key = name.partition(".")
        value = told[table].get(key)
        if value is None:
            continue
        usual, why = STANDING.get(name, (None, ""))
        said = EMBEDDED if name in unsaid else "given"
        reason = prepared.reasons.get(name, why if value == usual else said)
        found.append({"key": name, "value": value, "why": reason})
    return found


def print_settings(target: Console, settings: list[dict[str, Any]]) -> None:
    """``settings_record`` as a table."""
    rows = {
        SETTINGS[entry["key"]]: f"{_number(entry['value'])}: {entry['why']}" for entry in settings
    }
    print_table(target, "Settings (what was left out follows docs/defaults.md)", rows)


def _number(value: Any) -> str:
    return f"{value:,.6g}" if isinstance(value, int | float) else str(value)


def too_long(record: dict[str, Any]) -> str | None:
    """A warning where the forecast exceeds the hours allowed; None where it does not."""
    hours, allowed = record["predicted_seconds"] / 3600, record["hours_allowed"]
    if hours <= allowed:
        return None
    given = {entry["key"] for entry in record["settings"] if entry["why"] == "given"}
    sizes = [k for k in given if k in ("training.expected_batch_size", "training.steps")]
    sizes += ["training.epochs"] if "training.epochs" in given else []
    remedy = f"leave out {' and '.join(sorted(sizes))}, " if sizes else "train less (model.tune), "
    return (
        f"training would take about {duration(record['predicted_seconds'])}, and training.hours = "
        f"{allowed:g} are allowed{'' if allowed >= 2 else f' ({duration(3600 * allowed)})'}: "
        f"{remedy}or allow more"
    )


def duration(seconds: float) -> str:
    """A time that was forecast, in words."""
    return f"{seconds:.0f} s" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
