"""The kinds of data that training knows, one a line: the first that reads a
configuration takes it.
"""

from __future__ import annotations

from quietgrad.training.settings.config import TrainConfig
from quietgrad.training.settings.overrides import default_config_path, read_toml
from quietgrad.training.tasks.answers.task import AnswersTask
from quietgrad.training.tasks.images.task import ImagesTask
from quietgrad.training.tasks.tables.task import TablesTask
from quietgrad.training.tasks.task import Task
from quietgrad.training.tasks.text.task import TextTask

KINDS: tuple[type[Task], ...] = (
    ImagesTask,
    TablesTask,
    AnswersTask,
    TextTask,
)


def load_task(config: TrainConfig) -> Task:
    """Reads and splits the records of a configuration.

    Raises:
        ValueError: for data that are not there, or that do not go with the model.
    """
    kind = kind_of(config)
    _refuse_unread(config, kind)
    return kind.load(config)


def kind_of(config: TrainConfig) -> type[Task]:
    """The kind of data of a configuration."""
    return next(kind for kind in KINDS if kind.reads(config))


def _refuse_unread(config: TrainConfig, kind: type[Task]) -> None:
    """Refuses a setting that would be passed over in silence. What the embedded default says is
    nobody's, where ``--set`` names another model.

    Raises:
        ValueError: naming it, and what to do.
    """
    said, usual = config.to_dict(), TrainConfig().to_dict()
    embedded = read_toml(default_config_path())
    for name in kind.unread:
        table, key = name.split(".")
        value = said[table].get(key)
        if value not in (usual[table].get(key), embedded.get(table, {}).get(key)):
            raise ValueError(
                f"{name}={value!r} says nothing to {kind.what}, which data.source, model.name and "
                "task.kind ask for here; leave it out, or change one of these"
            )
