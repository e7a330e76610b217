"""Classes of texts, one or two texts a record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from quietgrad.training.exporting.exportable import Exportable, of_tokens
from quietgrad.training.files.provenance import Record
from quietgrad.training.precision import precision_context
from quietgrad.training.settings.config import TrainConfig
from quietgrad.training.tasks.loaded import LoadedModel
from quietgrad.training.tasks.predictions import Predictions, classified, read_new
from quietgrad.training.tasks.records import Records, Told, outputs, unheard
from quietgrad.training.tasks.splits import (
    IGNORED,
    Splits,
    split,
    split_with_test,
    with_public_labels,
)
from quietgrad.training.tasks.task import (
    EVALUATION_BATCH,
    OF_ANSWERS,
    OF_IMAGES,
    Parts,
    Task,
    attention_for,
    ready,
)
from quietgrad.training.tasks.text.batches import (
    TokenisedTexts,
    every_other,
    fitting_length,
    tokenise,
    tokens_kept,
)
from quietgrad.training.tasks.text.data import (
    LabelledTexts,
    load_texts,
    text_columns,
    unlabelled_texts,
)
from quietgrad.training.tasks.text.models import load_classifier
from quietgrad.training.tasks.text.prefix_cache import PrefixCache, build_prefix_cache
from quietgrad.training.tasks.text.public_head import draw_random_head, fit_public_head
from quietgrad.training.tasks.text.saved import load_saved, save_classifier


class TextTask(Task):
    """Labelled texts and an encoder with a head."""

    what = "a classifier of texts"
    unread = (*OF_IMAGES, *OF_ANSWERS)

    def __init__(self, splits: Splits[LabelledTexts]) -> None:
        self.splits = splits

    @classmethod
    def reads(cls, config: TrainConfig) -> bool:
        """Whatever no other kind reads."""
        return True

    @classmethod
    def load(cls, config: TrainConfig) -> TextTask:
        """See ``Task.load``."""
        data = config.data
        refuse_weights_of_images(config)
        named = (data.text, data.label, data.text_pair, data.user, data.skip_bad)
        texts = load_texts(data.source, *named)
        if data.test_source:
            test = load_texts(data.test_source, *named, "data.test_source")
            splits = split_with_test(texts, test, data.validation_fraction)
        else:
            splits = split(texts, data.validation_fraction, data.test_fraction)
        return cls(with_public_labels(splits, data.labels))

    def read(self, config: TrainConfig, device: torch.device) -> tuple[LoadedModel, Parts]:
        """See ``Task.read``."""
        table = config.model
        model = load_classifier(
            table.name, len(self.label_names), table.tuning, table.head, attention_for(device)
        )
        kept = fitting_length(table.name, model.classifier, model.tokenizer, table.max_length)
        splits = self.splits
        train, validation, test = (
            tokenise(part, model.tokenizer, kept)
            for part in (splits.train, splits.validation, splits.test)
        )
        ready(config, model, device)
        if table.public_head_steps:
            # Accuracy on records that the head was fitted to would say little.
            fitted, validation = every_other(validation)
            with precision_context(config, device):
                fit_public_head(model.classifier, fitted, device, table.public_head_steps)
        if table.random_head:
            draw_random_head(model.classifier)
        return model, (train, validation, test)

    @property
    def copies_count_once(self) -> bool:
        """See ``Task``."""
        return True

    def save(self, model: LoadedModel, folder: Path, trained_on: Record) -> None:
        """In Hugging Face's format, the head beside it."""
        save_classifier(model, self.label_names, folder, trained_on)

    @classmethod
    def predict(
        cls, config: TrainConfig, folder: Path, file: Path, device: torch.device
    ) -> Predictions:
        """See ``Task.predict``; a record without a text stays without a label."""
        first, second = text_columns(config.data)
        wanted = {first: "data.text"} | ({second: "data.text_pair"} if second else {})
        columns = read_new(file, wanted)
        texts = unlabelled_texts(columns, first, second, str(file))
        model, tokenizer, labels = load_saved(folder, attention_for(device))
        tokens = tokenise(texts, tokenizer, tokens_kept(model, config.model.max_length))
        logits = outputs(model.to(device), tokens, EVALUATION_BATCH, device)
        return classified(columns, labels, logits, usable=texts.labels != IGNORED)

    @classmethod
    def exportable(cls, config: TrainConfig, folder: Path) -> Exportable:
        """See ``Task.exportable``; the tokenizer stays in ``folder``."""
        model, _, labels = load_saved(folder, attention_for(torch.device("cpu")))
        return of_tokens(model, labels, {"tokenizer": "RUN_DIR/model"})

    def cache(
        self,
        config: TrainConfig,
        classifier: nn.Module,
        records: Records,
        validation: Records,
        device: torch.device,
        told: Told = unheard,
    ) -> PrefixCache | None:
        """The frozen lower layers, run once a record."""
        assert isinstance(records, TokenisedTexts) and isinstance(validation, TokenisedTexts)

        def precision() -> Any:
            return precision_context(config, device)

        return build_prefix_cache(classifier, records, validation, device, precision, told)


def refuse_weights_of_images(config: TrainConfig) -> None:
    """Raises where a setting for image models is given for texts.

    Raises:
        ValueError: with the remedy.
    """
    if config.model.weights:
        raise ValueError(
            "model.weights is for image models; a text model's folder goes to model.name"
        )
