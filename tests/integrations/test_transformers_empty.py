"""Records that hold nothing, at the doors of the Trainers: texts without a word, cells without a
text. Each is a record like any other, and none ends the run with an error that tells of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from integrations.private_trainers import classifier, llama, tokenizer, trainer
from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding

from quietgrad import PrivacyConfig
from quietgrad.integrations.transformers import (
    PrivateDPOTrainer,
    PrivateSFTTrainer,
    PrivateTrainer,
)
from quietgrad.integrations.transformers.losses import record_loss_of
from quietgrad.integrations.transformers.sft import without_gaps

trl = pytest.importorskip("trl")

# A rate at which a record is drawn in some step for sure, nearly: all but 1e-7.
OFTEN = PrivacyConfig(
    noise_multiplier=1.0, target_delta=1e-3, sample_rate=0.5, steps=24, seed=1, data_are_public=True
)
SIZES = [3, 4, 0, 5, 3, 4]


def words(size: int) -> dict[str, Any]:
    return {"input_ids": [3 + i % 5 for i in range(size)], "attention_mask": [1] * size}


def ran(made: Any) -> None:
    made.train()
    assert made.state.global_step == OFTEN.steps


@pytest.mark.parametrize("labelled", [True, False])
def test_a_text_without_a_word_ends_no_run(tmp_path: Path, labelled: bool) -> None:
    """Before: "cannot reshape tensor of 0 elements into shape [1, 0, -1, 8]", in a later release:
    how many records there were, and that they were empty.
    """
    made: list[dict[str, Any]] = [words(size) for size in SIZES]
    if labelled:
        made = [record | {"labels": i % 2} for i, record in enumerate(made)]
    masks = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    ran(
        trainer(
            tmp_path,
            model=classifier(dropout=0.0) if labelled else llama(),
            data_collator=DataCollatorWithPadding(tokenizer()) if labelled else masks,
            train_dataset=made,
            privacy=OFTEN,
            per_device_train_batch_size=1,
        )
    )


def test_an_empty_text_alone_is_what_it_is_beside_others() -> None:
    model = classifier(dropout=0.0).eval()
    loss = record_loss_of(model, ["labels"], 0.0)
    collate = DataCollatorWithPadding(tokenizer())
    records = [words(size) | {"labels": 1} for size in (0, 7)]
    with torch.no_grad():
        alone, beside = (loss(model, dict(collate(records[:n])))[0] for n in (1, 2))
    torch.testing.assert_close(alone, beside)


def private(kind: type[PrivateTrainer], data: Any, folder: Path, **changes: Any) -> Any:
    """A trainer of TRL's."""
    of = trl.SFTConfig if kind is PrivateSFTTrainer else trl.DPOConfig
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": None,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return kind(
        model=llama(),
        args=of(**(settings | changes)),
        train_dataset=data,
        processing_class=tokenizer(),
        privacy=OFTEN,
    )


TEXT = [{"text": "a b c"}, {"text": "a b"}, {"text": None}] * 2
ANSWER = [{"prompt": "a b", "completion": "c"}, {"prompt": "a", "completion": None}] * 3
PREFERRED = [
    {"prompt": "a b", "chosen": "c", "rejected": "d"},
    {"prompt": "a", "chosen": None, "rejected": "d"},
] * 3


@pytest.mark.parametrize(
    ("kind", "data"),
    [(PrivateSFTTrainer, TEXT), (PrivateSFTTrainer, ANSWER), (PrivateDPOTrainer, PREFERRED)],
    ids=["text", "answer", "preference"],
)
def test_a_missing_text_is_an_empty_one(
    kind: type[PrivateTrainer], data: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Before: "'NoneType' object has no attribute 'endswith'", beside a bar that said at which
    record.
    """
    made = private(kind, data, tmp_path)
    assert len(made.train_dataset) == len(data)
    ran(made)


@pytest.mark.parametrize("max_length", [None, 8])
def test_a_row_without_words_makes_no_type_for_those_beside_it(
    tmp_path: Path, max_length: int | None
) -> None:
    """Before: refused as a collator that mixes, in the release that met it first in a batch."""
    rows = [{"input_ids": [3 + i % 5] * size} for i, size in enumerate(SIZES)]
    made = private(PrivateSFTTrainer, rows, tmp_path, max_length=max_length)
    kept = made.train_dataset[2]
    assert kept["input_ids"] == [tokenizer().pad_token_id] and kept["labels"] == [-100]
    ran(made)


def test_preferences_that_are_tokenised_already(tmp_path: Path) -> None:
    """Before: KeyError 'chosen', though the columns were said to be readable."""
    rows = [{"prompt_ids": [3, 4], "chosen_ids": [5], "rejected_ids": [6, 7]}] * 6
    made = private(PrivateDPOTrainer, rows, tmp_path)
    assert made.train_dataset["chosen_ids"][0] == [5]
    ran(made)


def test_only_columns_that_are_read_as_texts_are_filled() -> None:
    table = Dataset.from_list(
        [
            {"prompt": None, "note": None, "score": None, "body": "b"},
            {"prompt": "a", "note": "n", "score": 1.0, "body": None},
        ]
    )
    found = without_gaps(table, "body").to_list()
    assert found[0] == {"prompt": "", "note": None, "score": None, "body": "b"}
    assert found[1] == {"prompt": "a", "note": "n", "score": 1.0, "body": ""}
    assert without_gaps([1, 2]) == [1, 2]
