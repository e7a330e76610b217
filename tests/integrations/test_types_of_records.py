"""Collators of transformers take the first record's type for all, or make one of two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from private_trainers import records, trainer
from transformers import DataCollatorWithPadding, DefaultDataCollator, default_data_collator
from transformers.trainer_utils import RemoveColumnsCollator

from quietgrad.loading.collating import Collating

NUMBERS: list[dict[str, Any]] = [{"x": [1, 2], "label": i + 0.5, "text": "a"} for i in range(6)]


def without_columns() -> Any:
    return RemoveColumnsCollator(default_data_collator, ["x", "label"])


COLLATORS = [lambda: default_data_collator, DefaultDataCollator, without_columns]


@pytest.mark.parametrize("made", COLLATORS)
@pytest.mark.parametrize("odd", [{"label": 1}, {"x": [0.5, 1]}, {"x": None}, {"label": "b"}])
def test_records_of_two_types_are_refused(made: Any, odd: dict[str, Any]) -> None:
    collating = Collating(made())
    assert len(collating(NUMBERS)["labels"]) == 6
    other = NUMBERS[0] | odd
    for mixed in ([other, *NUMBERS], [*NUMBERS, other]):
        with pytest.raises(ValueError, match="values of different types in one place"):
            collating(mixed)


def test_what_is_left_out_anyway_may_be_anything() -> None:
    collating = Collating(without_columns())
    for value in (None, 3, [1.5]):
        assert len(collating([NUMBERS[0] | {"text": value}, *NUMBERS])["labels"]) == 7
    assert len(Collating(default_data_collator)([NUMBERS[0] | {"text": None}, *NUMBERS])) == 2


def test_what_the_first_record_does_without_the_look() -> None:
    """Everybody's label loses what is behind its point."""
    labels = default_data_collator([{"label": 1}, *({"label": r["label"]} for r in NUMBERS)])
    assert labels["labels"].tolist() == [1, 0, 1, 2, 3, 4, 5]


def test_a_trainer_refuses_one_record_that_no_look_has_seen(tmp_path: Path) -> None:
    data = [record | {"label": 1.0} for record in records()]
    for record in data:
        del record["labels"]
    data[1]["label"] = 1
    trained = trainer(
        tmp_path, train_dataset=data, data_collator=default_data_collator,
        per_example_loss=lambda model, batch: (
            model(batch["input_ids"], batch["attention_mask"]).logits[:, 0] * batch["labels"]
        ),
    )  # fmt: skip
    with pytest.raises(ValueError, match="values of different types in one place"):
        trained.train()


def test_padding_is_looked_at_too() -> None:
    class Padding:
        padding_side = "right"

        def pad(self, found: Any, **_: Any) -> Any:
            return {"labels": torch.tensor([one["label"] for one in found])}

    collating = Collating(DataCollatorWithPadding(Padding()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="values of different types in one place"):
        collating([{"label": 1}, {"label": 0.5}])
