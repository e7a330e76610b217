"""The kinds of data that training knows, one a line: the first that reads a
configuration takes it.
"""

from __future__ import annotations

from quietgrad.training.settings.config import TrainConfig
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
    return kind_of(config).load(config)


def kind_of(config: TrainConfig) -> type[Task]:
    """The kind of data of a configuration."""
    return next(kind for kind in KINDS if kind.reads(config))
