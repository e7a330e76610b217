"""Tokenizers warn of a text that is too long, and say how long it is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from private_trainers import PRIVACY, llama, tokenizer
from torch import nn

from quietgrad import PrivacyConfig
from quietgrad.integrations.transformers import PrivateTrainer
from quietgrad.training.tasks.answers.pairs import TextPairs, tokenise_pairs

LONG = 137  # words of one record
WARNED = "transformers.tokenization_utils_base"


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What tokenizers write."""
    found: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger(WARNED), Kept()
    before, level = list(logger.filters), logger.level
    logger.filters.clear()
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.filters[:] = before


def short() -> Any:
    made = tokenizer()
    made.model_max_length = 8
    return made


def test_the_table_is_what_transformers_writes(lines: list[str]) -> None:
    short()("a " * LONG)
    assert [str(LONG) in line for line in lines] == [True]


def test_of_answers_nothing_is_said(lines: list[str]) -> None:
    tokenise_pairs(TextPairs(("a b", "a " * LONG), ("c", "d"), "file"), short(), 8, 3)
    assert not lines


def test_in_a_loader_no_length_is_said(lines: list[str]) -> None:
    made = short()

    def collate(texts: list[str]) -> dict[str, Any]:
        tokens = made(texts)["input_ids"]
        return {"input_ids": torch.tensor([row[:4] + [0] * (4 - len(row[:4])) for row in tokens])}

    config = PrivacyConfig(noise_multiplier=1.0, sample_rate=1.0, steps=1, data_are_public=True)
    with config.build(20).start() as run:
        (part,) = next(iter(run.loader(["a " * LONG] * 20, collate_fn=collate)))
    assert len(part.records["input_ids"]) == 20
    assert lines and not any(str(LONG) in line for line in lines)


def test_in_a_loader_no_size_of_a_picture_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Before: "The channel dimension is ambiguous. Got image shape (3, 137, 3)"."""
    from transformers import image_utils

    logger = logging.getLogger("transformers.image_utils")
    logger.addHandler(caplog.handler)
    logger.filters.clear()
    try:
        image_utils.infer_channel_dimension_format(np.zeros((3, LONG, 3)))
        assert str(LONG) in caplog.text  # what transformers writes
        caplog.clear()

        class Pictures(torch.utils.data.Dataset[Any]):
            def __len__(self) -> int:
                return 20

            def __getitem__(self, index: int) -> Any:
                picture = np.zeros((3, LONG, 3), np.float32)
                image_utils.infer_channel_dimension_format(picture)
                return picture

        config = PrivacyConfig(noise_multiplier=1.0, sample_rate=1.0, steps=1, data_are_public=True)
        with config.build(20).start() as run:
            next(iter(next(iter(run.loader(Pictures())))))
    finally:
        logger.removeHandler(caplog.handler)
    assert "ambiguous" in caplog.text and str(LONG) not in caplog.text


def test_in_trainers_no_length_is_said(lines: list[str], tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs the extra trl")
    from trl import SFTConfig

    from quietgrad.integrations.transformers import PrivateSFTTrainer

    PrivateSFTTrainer(
        model=llama(),
        args=SFTConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], max_length=12,
            gradient_checkpointing=None,
        ),
        processing_class=short(),
        privacy=PRIVACY,
        train_dataset=Dataset.from_list([{"prompt": "a " * LONG, "completion": "c"}] * 40),
    )  # fmt: skip
    assert lines and not any(str(LONG) in line for line in lines)


def test_a_collator_of_a_trainer_says_no_length(lines: list[str], tmp_path: Path) -> None:
    from transformers import TrainingArguments

    made = short()

    def collate(texts: list[Any]) -> dict[str, Any]:
        rows = torch.tensor([row[:4] for row in made([t["text"] for t in texts])["input_ids"]])
        return {"input_ids": rows, "labels": rows}

    class Texts(list[Any]):
        pass

    arguments = TrainingArguments(
        str(tmp_path), remove_unused_columns=False, use_cpu=True, report_to=[], save_strategy="no"
    )
    PrivateTrainer(
        llama(), arguments, collate, Texts([{"text": "a " * LONG}] * 40), privacy=PRIVACY,
        per_example_loss=lambda model, batch: _loss(model, batch),
    ).train()  # fmt: skip
    assert lines and not any(str(LONG) in line for line in lines)


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    kept = logits.log_softmax(-1).gather(2, batch["labels"].unsqueeze(2))
    return -kept.mean((1, 2))
