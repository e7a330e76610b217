"""What is learnt from what: records and classifier of a configuration, texts or images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from quietgrad.training.config import TrainConfig
from quietgrad.training.data import LabelledTexts, Splits, load_texts, split, split_with_test
from quietgrad.training.image_data import LabelledImages, is_image_source, load_images, split_images
from quietgrad.training.image_folder import FolderLayout, is_image_folder, load_image_folder, load_unlabelled_folder
from quietgrad.training.image_models import IMAGE_MODELS, is_image_model, load_image_classifier
from quietgrad.training.models import HeadKind, LoadedModel, load_classifier, load_generator
from quietgrad.training.pairs import TextPairs, load_pairs, tokenise_pairs
from quietgrad.training.records import Records
from quietgrad.training.text_batches import tokenise

DROPOUT_RATES = ("dropout", "attention_dropout", "activation_dropout", "hidden_dropout", "dropout_prob", "drop_prob")


@dataclass(frozen=True)
class Task:
    """Records, split, before the model is loaded.

    Attributes:
        splits: raw records.
        public: images set aside as public and unlabelled; None for texts.
    """

    splits: Splits[LabelledTexts] | Splits[TextPairs] | Splits[LabelledImages]
    public: LabelledImages | None = None

    @property
    def label_names(self) -> tuple[str, ...]:
        return self.splits.train.label_names

    @property
    def image_shape(self) -> tuple[int, ...] | None:
        """[channels, height, width] of the records; None for texts."""
        train = self.splits.train
        return tuple(train.pixels.shape[1:]) if isinstance(train, LabelledImages) else None

    @property
    def record_ids(self) -> tuple[bytes, ...]:
        """Of the private training records."""
        return self.splits.train.record_ids


def load_task(config: TrainConfig) -> Task:
    """Reads and splits the records.

    Raises:
        ValueError: for data that are not there, or that do not go with the model.
    """
    folder = is_image_folder(config.data.source)
    images, wanted = folder or is_image_source(config.data.source), is_image_model(config.model.name)
    if images != wanted:
        raise ValueError(
            f"data.source={config.data.source!r} holds {'images' if images else 'texts'}, and model.name={config.model.name!r} reads {'images' if wanted else 'texts'}; "
            f"image models are {', '.join(IMAGE_MODELS)} and image:NAME of Hugging Face"
        )
    if images:
        if config.task.kind == "generate" or config.data.test_source or config.data.text_pair:
            raise ValueError(
                "task.kind='generate', data.test_source and data.text_pair are for texts; images come with test records"
            )
        if config.model.public_head_steps or config.model.random_head:
            raise ValueError(
                "model.public_head_steps and model.random_head are for texts; give an image model public weights (model.weights, from quietgrad spectrum)"
            )
        if config.data.label_separator and not folder:
            raise ValueError(
                f"data.label_separator={config.data.label_separator!r} is for a folder with train.csv and test.csv; data.source={config.data.source!r} has one label a record"
            )
        train, test = load_any_images(config, config.data.source)
        splits, public = split_images(train, test, config.data.validation_fraction, config.data.public_fraction)
        return Task(splits, public)
    if config.model.weights:
        raise ValueError("model.weights is for image models; a text model's folder goes to model.name")
    return _text_task(config)


def _text_task(config: TrainConfig) -> Task:
    data, task = config.data, config.task

    def read(source: str, names: list[str] | None) -> Any:
        if task.kind == "generate":
            return load_pairs(source, task.prompt, task.answer)
        return load_texts(source, data.text, data.label, names, data.text_pair)

    texts = read(data.source, data.labels or None)
    if not data.test_source:
        return Task(split(texts, data.validation_fraction, data.test_fraction))
    names = list(texts.label_names)  # the test records' own may be fewer
    return Task(split_with_test(texts, read(data.test_source, names or None), data.validation_fraction))


def load_unlabelled_images(config: TrainConfig, source: str, channels: int) -> LabelledImages:
    """Training images of a source of either kind, at the configuration's size and with so many channels; their labels are not looked at."""
    if not is_image_folder(source):
        return load_images(source, config.data.image_size)[0].with_channels(channels)
    return load_unlabelled_folder(source, _layout(config), config.data.image_size, channels)


def _layout(config: TrainConfig) -> FolderLayout:
    data = config.data
    named = (data.text, data.label) != ("text", "label")  # the defaults are those of texts
    return FolderLayout(
        *((data.text, data.label) if named else ("file", "label")),
        separator=data.label_separator,
        labels=tuple(data.labels),
        no_label=data.no_label,
    )


def load_any_images(config: TrainConfig, source: str) -> tuple[LabelledImages, LabelledImages]:
    """Training and test images of a source of either kind, at the configuration's size."""
    if not is_image_folder(source):
        return load_images(source, config.data.image_size)
    return load_image_folder(source, _layout(config), config.data.image_size)


def load_model(config: TrainConfig, task: Task, device: torch.device) -> tuple[LoadedModel, list[Records]]:
    """The classifier on its device, in training mode, and training, validation and test records as it reads them."""
    parts = (task.splits.train, task.splits.validation, task.splits.test)
    table = config.model
    # On a processor eager attention is several times faster than the fused kernel for short texts.
    attention = "eager" if device.type == "cpu" else None
    records: list[Any]
    if isinstance(task.splits.train, LabelledImages):
        shape = tuple(task.splits.train.pixels.shape[1:])
        classifier = load_image_classifier(table.name, shape, len(task.label_names), table.tuning, table.weights)
        model = LoadedModel(classifier, None, table.name, table.tuning.how, "mean")
        records = list(parts)
    elif isinstance(task.splits.train, TextPairs):
        model = load_generator(table.name, table.tuning, attention)
        pairs = cast(tuple[TextPairs, ...], parts)
        records = [tokenise_pairs(p, model.tokenizer, table.max_length, config.task.max_answer_length) for p in pairs]
    else:
        model = load_classifier(table.name, len(task.label_names), table.tuning, cast(HeadKind, table.head), attention)
        texts = cast(tuple[LabelledTexts, ...], parts)
        records = [tokenise(part, model.tokenizer, table.max_length) for part in texts]
    for module in model.classifier.modules():
        if isinstance(module, nn.Dropout):
            module.p = config.model.dropout
        for name in DROPOUT_RATES:  # modules that call F.dropout, and those that drop whole paths
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, config.model.dropout)
    model.classifier.to(device).train()
    return model, records
