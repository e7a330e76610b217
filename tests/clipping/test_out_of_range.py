"""A token beyond the vocabulary or a label beyond the classes ends in one message that names the
layer and the remedy, and tells neither the record's number nor how many records there were.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.engines.work import Engine

ROWS, CLASSES, RECORDS, WRONG = 20, 3, 211, 9117


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        return self.head(self.words(tokens_bt).mean(dim=1))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def gathered(model: nn.Module, batch: Any) -> Tensor:
    return -F.log_softmax(model(batch[0]), dim=1).gather(1, batch[1].unsqueeze(1))[:, 0]


def functional(model: Any, batch: Any) -> Tensor:
    read = F.embedding(batch[0], model.words.weight).mean(dim=1)
    return F.cross_entropy(model.head(read), batch[1], reduction="none")


def of_bags(model: Any, batch: Any) -> Tensor:
    read = F.embedding_bag(batch[0], model.words.weight)
    return F.cross_entropy(model.head(read), batch[1], reduction="none")


def told(
    loss: Callable[[nn.Module, Any], Tensor], tokens: Tensor, labels: Tensor, engine: Engine
) -> str:
    bound = Clipper(1.0, engine=engine).bind(Reader(), loss)
    with pytest.raises(ValueError) as caught:
        bound.clip((tokens, labels))
    said = "".join(traceback.format_exception(caught.value))
    assert str(WRONG) not in said and str(RECORDS) not in str(caught.value)
    assert "During handling" not in said and "direct cause" not in said
    return str(caught.value)


def records() -> tuple[Tensor, Tensor]:
    return torch.arange(RECORDS * 5).view(RECORDS, 5) % ROWS, torch.arange(RECORDS) % CLASSES


@pytest.mark.parametrize("engine", ["auto", "one-example"])
@pytest.mark.parametrize("loss", [cross_entropy, functional, of_bags])
def test_a_token_beyond_the_vocabulary_names_the_layer_and_not_the_token(
    loss: Callable[[nn.Module, Any], Tensor], engine: Engine
) -> None:
    tokens, labels = records()
    tokens[11, 2] = WRONG
    found = told(loss, tokens, labels, engine)
    assert "layer 'words' has 20 rows" in found and "none of 0 to 19" in found
    assert "resize_token_embeddings" in found


@pytest.mark.parametrize("engine", ["auto", "one-example"])
def test_a_label_beyond_the_classes_is_not_told(engine: Engine) -> None:
    tokens, labels = records()
    labels[11] = WRONG
    found = told(cross_entropy, tokens, labels, engine)
    assert "label is none of the 3 classes" in found


def test_a_place_beyond_a_tensor_is_told_by_its_line_alone() -> None:
    tokens, labels = records()
    labels[11] = WRONG
    assert "(test_out_of_range.py, line " in told(gathered, tokens, labels, "auto")


def test_another_error_of_a_users_code_stays_what_it_was() -> None:
    def broken(model: nn.Module, batch: Any) -> Tensor:
        raise IndexError("list index out of range")

    with pytest.raises(IndexError, match=r"^list index out of range$"):
        Clipper(1.0).bind(Reader(), broken).clip(records())
