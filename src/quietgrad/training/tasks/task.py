"""What a kind of data is to training: records, a model that reads them, a loss, scores, and what is
saved.

A kind is a folder beside this file with one ``Task`` in ``task.py``, and a line in ``registry``.
What stands here is what every classifier shares; a kind replaces what is its own.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quietgrad.training.exporting.exportable import Exportable
from quietgrad.training.files.provenance import Record
from quietgrad.training.settings.config import TrainConfig
from quietgrad.training.tasks.class_scores import class_scores
from quietgrad.training.tasks.loaded import LoadedModel
from quietgrad.training.tasks.metrics import Metric, metric_for
from quietgrad.training.tasks.predictions import Predictions
from quietgrad.training.tasks.records import (
    Batches,
    Records,
    Told,
    classification_loss,
    outputs,
    unheard,
)
from quietgrad.training.tasks.splits import Splits

EVALUATION_BATCH = 256
DROPOUT_RATES = (
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "hidden_dropout",
    "dropout_prob",
    "drop_prob",
)
PATH_DROPOUT = "StochasticDepth"  # torchvision's module
Parts = tuple[
    Records, Records, Records
]  # training (private), validation and test records (declared public)


# Keys that some kinds of data do not read: what a user sets there would be passed over.
OF_IMAGES = ("data.label_separator", "data.no_label", "data.image_size", "data.public_fraction")
OF_ANSWERS = (
    "task.prompt",
    "task.answer",
    "task.max_answer_length",
    "task.decoded",
    "task.decoded_records",
)
OF_TEXTS = ("data.text_pair", "model.head", "model.public_head_steps", "model.random_head")


@dataclass(frozen=True)
class FinalScores:
    """What a finished run reports of public records.

    Attributes:
        metrics: name -> number.
        classes: "test" and "validation" -> ``class_scores``; empty where there are no classes.
        counted: "test" and "validation" -> how many records: equal inputs are one.
        guessing: what the class most frequent among validation records would score in the test;
            None where the score is no accuracy.
    """

    metrics: dict[str, float]
    classes: dict[str, Any] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    guessing: float | None = None


class Task(ABC):
    """Records of one kind, split, before the model is loaded.

    Attributes:
        splits: raw records.
        what: is learnt, in words.
        unread: keys that are refused, since nothing of this kind reads them.
    """

    splits: Splits[Any]
    what: ClassVar[str] = "records of this kind"
    unread: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abstractmethod
    def reads(cls, config: TrainConfig) -> bool:
        """Whether a configuration is of this kind."""

    @classmethod
    @abstractmethod
    def load(cls, config: TrainConfig) -> Task:
        """Reads and splits the records.

        Raises:
            ValueError: for data that are not there, or that do not go with the model.
        """

    @abstractmethod
    def read(self, config: TrainConfig, device: torch.device) -> tuple[LoadedModel, Parts]:
        """The model on its device, in training mode, and the records as it reads them."""

    @abstractmethod
    def save(self, model: LoadedModel, folder: Path, trained_on: Record) -> None:
        """Writes the trained model, and what it was trained on, into a folder."""

    @classmethod
    @abstractmethod
    def predict(
        cls, config: TrainConfig, folder: Path, file: Path, device: torch.device
    ) -> Predictions:
        """What a saved model says of new records, which need no labels.

        Args:
            config: of the run that made the model.
            folder: what ``save`` wrote.
            file: the records; they are read before the model is.
            device: where the model runs.

        Raises:
            ValueError: for records that are not there, or lack what the model reads.
        """

    @classmethod
    @abstractmethod
    def exportable(cls, config: TrainConfig, folder: Path) -> Exportable:
        """What ``save`` wrote, as a function of tensors."""

    @property
    def label_names(self) -> tuple[str, ...]:
        names: tuple[str, ...] = self.splits.train.label_names
        return names

    @property
    def learnt(self) -> str:
        """A digest of what the model's inputs and outputs mean, which is public; a run that goes on
        must find the same.
        """
        told = json.dumps([self.label_names, self.how_read()])
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    def how_read(self) -> object:
        """What of the public records decides how the model reads all of them."""
        return None

    @property
    def record_ids(self) -> tuple[bytes, ...]:
        """Of the private training records."""
        ids: tuple[bytes, ...] = self.splits.train.record_ids
        return ids

    @property
    def record_owner(self) -> tuple[bytes, ...] | None:
        """Of the private training records, where users are protected."""
        owners: tuple[bytes, ...] | None = getattr(self.splits.train, "owners", None)
        return owners

    @property
    def form(self) -> tuple[int, ...] | None:
        """Shape of a record's tensor, where public ones can be told to be of the same kind by it;
        None elsewhere.
        """
        return None

    @property
    def copies_count_once(self) -> bool:
        """Whether validation and test records with equal inputs are one record in every score: a
        message that many passed on. Rows of a table may be alike and still be different people.
        """
        return False

    @property
    def classifies(self) -> bool:
        """Whether a record has a label that can be replaced by a wrong one."""
        return True

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """[examples], one loss a record; from inputs or cached states alike."""
        return classification_loss(model, batch)

    def metric(self, validation: Records) -> Metric:
        """What the model is judged by."""
        return metric_for(validation.labels)

    def evaluation_batch(self, config: TrainConfig) -> int:
        """Records of a batch without gradients."""
        return EVALUATION_BATCH

    def cache(
        self,
        config: TrainConfig,
        classifier: nn.Module,
        records: Records,
        validation: Records,
        device: torch.device,
        told: Told = unheard,
    ) -> Any:
        """States of records below the lowest trainable part, computed once; None where there is no
        such thing. ``told`` hears how far it is.
        """
        return None

    def score(
        self,
        config: TrainConfig,
        model: nn.Module,
        records: Records,
        device: torch.device,
        chosen: NDArray[np.int64] | None = None,
        source: Batches | None = None,
    ) -> float:
        """The metric on ``records`` (those at the indices ``chosen``; None: all), higher is better;
        see ``records.outputs``.
        """
        found = outputs(model, records, self.evaluation_batch(config), device, chosen, source)
        return self.metric(records)(
            found, records.labels if chosen is None else records.labels[chosen]
        )

    def final_scores(
        self,
        config: TrainConfig,
        model: LoadedModel,
        validation: Records,
        test: Records,
        device: torch.device,
        cached_validation: Any = None,
    ) -> FinalScores:
        """What a finished run reports of its test and validation records, which are public;
        ``cached_validation``: what ``cache`` made of the validation records.
        """
        metric, size = self.metric(validation), self.evaluation_batch(config)
        metrics, classes = {}, {}
        for prefix, name, part, cache in (
            ("", "test", test, None),
            ("validation_", "validation", validation, cached_validation),
        ):
            module = model.classifier if cache is None else cache.upper
            logits = outputs(module, part, size, device, source=cache)
            metrics[f"{prefix}{metric.key}"] = metric(logits, part.labels)
            classes[name] = class_scores(logits, part.labels, self.label_names)
        return FinalScores(metrics, classes)


def ready(config: TrainConfig, model: LoadedModel, device: torch.device) -> LoadedModel:
    """With dropout at the configured rate, on the device, in training mode."""
    for module in model.classifier.modules():
        if isinstance(module, nn.Dropout) or type(module).__name__ == PATH_DROPOUT:
            cast(Any, module).p = config.model.dropout
        for name in DROPOUT_RATES:  # modules that call F.dropout, and those that drop whole paths
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, config.model.dropout)
    model.classifier.to(device).train()
    return model


def attention_for(device: torch.device) -> str | None:
    """On a processor eager attention is several times faster than the fused
    kernel for short texts.
    """
    return "eager" if device.type == "cpu" else None
