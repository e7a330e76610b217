"""Answers that a causal language model learns to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quietgrad.training.exporting.exportable import Exportable, of_tokens
from quietgrad.training.files.provenance import Record
from quietgrad.training.settings.config import TrainConfig
from quietgrad.training.tasks.answers.generation import (
    answer_loss,
    answer_scores,
    decoded_score,
    written_answers,
)
from quietgrad.training.tasks.answers.pairs import (
    TextPairs,
    TokenisedPairs,
    load_pairs,
    load_prompts,
    require_answers,
    tokenise_pairs,
)
from quietgrad.training.tasks.loaded import LoadedModel
from quietgrad.training.tasks.metrics import TOKEN_ACCURACY, Metric
from quietgrad.training.tasks.predictions import Predictions
from quietgrad.training.tasks.records import Batches, Records, spread
from quietgrad.training.tasks.splits import Splits, split, split_with_test
from quietgrad.training.tasks.task import (
    OF_IMAGES,
    OF_TEXTS,
    FinalScores,
    Parts,
    Task,
    attention_for,
    ready,
)
from quietgrad.training.tasks.text.batches import fitting_length, tokens_kept
from quietgrad.training.tasks.text.models import load_generator
from quietgrad.training.tasks.text.saved import load_saved, save_classifier
from quietgrad.training.tasks.text.task import refuse_weights_of_images


class AnswersTask(Task):
    """Prompts with answers, and a causal language model."""

    what = "a model of answers"
    unread = (*OF_IMAGES, *OF_TEXTS, "data.text", "data.label", "data.labels")

    def __init__(self, splits: Splits[TextPairs]) -> None:
        self.splits = splits

    @classmethod
    def reads(cls, config: TrainConfig) -> bool:
        """Where answers are asked for."""
        return config.task.kind == "generate"

    @classmethod
    def load(cls, config: TrainConfig) -> AnswersTask:
        """See ``Task.load``."""
        data, task = config.data, config.task
        refuse_weights_of_images(config)
        named = (task.prompt, task.answer, data.user, data.skip_bad)
        pairs = load_pairs(data.source, *named)
        if data.test_source:
            test = load_pairs(data.test_source, *named, "data.test_source")
            splits = split_with_test(pairs, test, data.validation_fraction)
        else:
            splits = split(pairs, data.validation_fraction, data.test_fraction)
        require_answers(splits)
        return cls(splits)

    def read(self, config: TrainConfig, device: torch.device) -> tuple[LoadedModel, Parts]:
        """See ``Task.read``."""
        table = config.model
        model = load_generator(table.name, table.tuning, attention_for(device))
        kept = fitting_length(table.name, model.classifier, model.tokenizer, table.max_length)
        splits, length = self.splits, config.task.max_answer_length
        train, validation, test = (
            tokenise_pairs(part, model.tokenizer, kept, length)
            for part in (splits.train, splits.validation, splits.test)
        )
        return ready(config, model, device), (train, validation, test)

    @property
    def copies_count_once(self) -> bool:
        """See ``Task``."""
        return True

    def save(self, model: LoadedModel, folder: Path, trained_on: Record) -> None:
        """In Hugging Face's format."""
        save_classifier(model, self.label_names, folder, trained_on)

    @classmethod
    def predict(
        cls, config: TrainConfig, folder: Path, file: Path, device: torch.device
    ) -> Predictions:
        """See ``Task.predict``: the answer that the model writes to each prompt."""
        task, table = config.task, config.model
        prompts, columns = load_prompts(file, task.prompt)
        model, tokenizer, _ = load_saved(folder, attention_for(device))
        room = tokens_kept(model, table.max_length) - task.max_answer_length
        pairs = tokenise_pairs(prompts, tokenizer, room, 0)
        everyone = np.arange(len(pairs))
        size, length = config.physical_batch_size, task.max_answer_length
        texts = written_answers(model.to(device), tokenizer, pairs, everyone, length, size)
        return Predictions(columns, {"answer": texts})

    @classmethod
    def exportable(cls, config: TrainConfig, folder: Path) -> Exportable:
        """See ``Task.exportable``: logits of the next token at each position."""
        model, _, _ = load_saved(folder, attention_for(torch.device("cpu")))
        return of_tokens(model, [], {"tokenizer": "RUN_DIR/model"})

    @property
    def classifies(self) -> bool:
        """No: an answer is many tokens."""
        return False

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """[examples] mean cross entropy over a record's answer tokens."""
        return answer_loss(model, batch)

    def metric(self, validation: Records) -> Metric:
        """The share of answer tokens predicted right."""
        return TOKEN_ACCURACY

    def evaluation_batch(self, config: TrainConfig) -> int:
        """No more than in training: outputs are as wide as the vocabulary."""
        return config.physical_batch_size

    def score(
        self,
        config: TrainConfig,
        model: nn.Module,
        records: Records,
        device: torch.device,
        chosen: NDArray[np.int64] | None = None,
        source: Batches | None = None,
    ) -> float:
        """See ``Task.score``."""
        assert isinstance(records, TokenisedPairs)
        return answer_scores(
            model, records, self.evaluation_batch(config), device, chosen
        ).token_accuracy

    def final_scores(
        self,
        config: TrainConfig,
        model: LoadedModel,
        validation: Records,
        test: Records,
        device: torch.device,
        cached_validation: Any = None,
    ) -> FinalScores:
        """Token accuracy, perplexity, and where asked the score of answers
        that the model writes.
        """
        found: dict[str, float] = {}
        for prefix, part in (("", test), ("validation_", validation)):
            assert isinstance(part, TokenisedPairs)
            scores = answer_scores(model.classifier, part, self.evaluation_batch(config), device)
            found |= {
                f"{prefix}{TOKEN_ACCURACY.key}": scores.token_accuracy,
                f"{prefix}perplexity": scores.perplexity,
            }
        task = config.task
        if task.decoded != "none":
            assert isinstance(test, TokenisedPairs)
            chosen = spread(test, task.decoded_records)
            found[task.decoded] = decoded_score(
                task.decoded,
                model.classifier,
                model.tokenizer,
                test,
                chosen,
                task.max_answer_length,
            )
        return FinalScores(found)
