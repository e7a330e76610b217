"""What the card beside weights says of where they began."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quietgrad.training.files.card import write_card
from quietgrad.training.files.provenance import provenance

FACTS = {"epsilon": 2.0, "delta": 1e-5, "steps": 10, "neighbouring": "add-remove"}


def card(folder: Path, base: str, tune: str, labels: tuple[str, ...], **options: Any) -> str:
    write_card(folder, provenance("a.csv", FACTS, False), base, tune, labels, "How.", **options)
    return (folder / "README.md").read_text()


@pytest.mark.parametrize("base", ["table:mlp", "cnn:groupnorm", "features:random"])
def test_what_begins_at_random_has_no_base_model(tmp_path: Path, base: str) -> None:
    said = card(tmp_path, base, "full", ("a", "b"))
    assert "base model" not in said.lower() and f"`{base}`, which begins at random" in said
    assert "whose epsilons add." in said and "over all 10 steps" in said


def test_what_begins_with_weights_has_one(tmp_path: Path) -> None:
    for said in (
        card(tmp_path, "cnn:groupnorm", "full", ("a", "b"), weights="public.safetensors"),
        card(tmp_path, "org/name", "head", ("a", "b")),
    ):
        assert "Base model: `" in said and "that the base model had already seen." in said


def test_adapters_of_a_language_model_train_no_head(tmp_path: Path) -> None:
    assert "LoRA adapters were trained" in card(tmp_path, "org/name", "lora", ())
    assert "LoRA adapters and the head were trained" in card(tmp_path, "org/name", "lora", ("a",))
