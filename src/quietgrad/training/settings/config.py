"""The configuration of a run, in Python and as a TOML file: small tables, each a record that judges
itself. What is judged here is what two tables say together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quietgrad.beside import AdaptiveClipping, TrainingLoss
from quietgrad.clipping.settings import Clipping, Performance
from quietgrad.denoising import GradientRule, MomentumRule
from quietgrad.noise.methods import IndependentNoise, NoiseMethod
from quietgrad.sampling.users import Users
from quietgrad.training.optimizers import SGD, AdamW, Optimizer
from quietgrad.training.settings.beside import ADAPTIVE_CLIPPING, TRAINING_LOSS
from quietgrad.training.settings.denoising import DENOISING
from quietgrad.training.settings.noise import NOISE, NoiseCurve
from quietgrad.training.settings.overrides import (
    default_config_path,
    read_toml,
    with_overrides,
)
from quietgrad.training.settings.reading import Table, each_table, one
from quietgrad.training.settings.schedules import SchedulesTable
from quietgrad.training.settings.tables import (
    DataTable,
    ModelTable,
    PrivacyTable,
    SpectrumTable,
    TaskTable,
    TrainingTable,
)

# A table of a file -> the records that it may be.
TABLES: Mapping[str, Table] = {
    "model": one(ModelTable),
    "task": one(TaskTable),
    "data": one(DataTable),
    "privacy": one(PrivacyTable),
    "schedules": one(SchedulesTable),
    "clipping": one(Clipping),
    "noise": NOISE,
    "spectrum": one(SpectrumTable),
    "denoising": DENOISING,
    "training_loss": TRAINING_LOSS,
    "adaptive_clipping": ADAPTIVE_CLIPPING,
    "optimizer": Table({"adamw": AdamW, "sgd": SGD}, "name"),
    "performance": one(Performance),
    "users": one(Users),
    "training": one(TrainingTable),
}
# Examples per forward pass where nothing is said; fewer where outputs are as wide as a vocabulary,
# more (so many tokens) where the head alone trains, whose body keeps nothing for a backward pass.
PHYSICAL_BATCH_SIZE, OF_ANSWERS, TOKENS_UNDER_A_HEAD = 64, 16, 32768


@dataclass(frozen=True)
class TrainConfig:
    """A whole configuration."""

    model: ModelTable = field(default_factory=ModelTable)
    task: TaskTable = field(default_factory=TaskTable)
    data: DataTable = field(default_factory=DataTable)
    privacy: PrivacyTable = field(default_factory=PrivacyTable)
    schedules: SchedulesTable = field(default_factory=SchedulesTable)
    clipping: Clipping = field(default_factory=Clipping)
    noise: NoiseMethod | NoiseCurve = field(default_factory=IndependentNoise)
    spectrum: SpectrumTable = field(default_factory=SpectrumTable)
    denoising: GradientRule | MomentumRule | None = None
    training_loss: TrainingLoss | None = None
    adaptive_clipping: AdaptiveClipping | None = None
    optimizer: Optimizer = field(default_factory=AdamW)
    performance: Performance = field(default_factory=Performance)
    users: Users = field(default_factory=Users)
    training: TrainingTable = field(default_factory=TrainingTable)

    def __post_init__(self) -> None:
        model = self.model
        if self.users != Users() and not self.data.user:
            raise ValueError(
                "users: this table says how users are protected, and nothing says whose a record "
                "is; name the column of the owners with data.user, or take the table out"
            )
        if self.task.kind == "generate" and (
            model.tune == "head" or model.public_head_steps or model.random_head
        ):
            raise ValueError(
                "task.kind='generate' has no head to train by itself (model.tune='head', "
                "model.public_head_steps, model.random_head); use model.tune = 'lora' or 'full'"
            )

        if self.training.sharded and self.momentum_rule is not None:
            raise ValueError(
                "training.sharded=true with a denoising of the first moment, which needs whole "
                "releases; use a rule that denoises the gradient (docs/denoising.md), or leave "
                "sharded out, and every process holds the whole model"
            )

    @property
    def gradient_rule(self) -> GradientRule | None:
        """What is made of a release; None where denoising acts elsewhere or not at all."""
        return self.denoising if isinstance(self.denoising, GradientRule) else None

    @property
    def momentum_rule(self) -> MomentumRule | None:
        """What is made of the first moment; None where denoising acts elsewhere or not at all."""
        return self.denoising if isinstance(self.denoising, MomentumRule) else None

    @property
    def physical_batch_size(self) -> int:
        """Most examples per forward pass."""
        given, usual = self.performance.max_physical_batch_size, PHYSICAL_BATCH_SIZE
        if self.task.kind == "generate":
            usual = OF_ANSWERS
        elif self.model.tune == "head" and not self.model.name.startswith(
            ("image:", "torchvision:")
        ):
            usual = max(usual, min(512, TOKENS_UNDER_A_HEAD // self.model.max_length))
        return given or usual

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Nested dictionaries, keys without a value left out."""
        return {name: table.written(getattr(self, name)) for name, table in TABLES.items()}

    def to_toml(self) -> str:
        """The configuration as a TOML file that reads back to itself."""
        lines: list[str] = []
        for table, values in self.to_dict().items():
            lines.append(f"[{table}]")
            lines += [f"{key} = {_toml_value(value)}" for key, value in values.items()]
            lines.append("")
        return "\n".join(lines)


def load_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    ignored: Sequence[str] = (),
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
    keys = {name: table.keys() for name, table in TABLES.items()}
    return config_from(with_overrides(tree, overrides, keys))


def config_from(tree: Mapping[str, Any]) -> TrainConfig:
    """Builds the configuration from nested dictionaries, checking every name and type."""
    built = {name: table.read(name, values) for name, table, values in each_table(tree, TABLES)}
    return TrainConfig(**built)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = (f"{_toml_value(key)} = {_toml_value(part)}" for key, part in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    # Strings, numbers, booleans and lists of strings are written alike in both, but for one
    # character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
