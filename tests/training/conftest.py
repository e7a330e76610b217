"""A tiny random BERT with a vocabulary of its own and a small data set: made once, used by all
training tests; tiny image models likewise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from image_model_cases import MEAN, STD
from tiny_runs import COMMON, VOCABULARY, WORDS, labelled_texts, write_records


@pytest.fixture(scope="session")
def csv_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_records(tmp_path_factory.mktemp("data") / "reviews.csv", labelled_texts())


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    import transformers

    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *COMMON,
        *WORDS["good"],
        *WORDS["bad"],
    ]
    folder = tmp_path_factory.mktemp("tiny-bert")
    transformers.utils.logging.disable_progress_bar()
    transformers.BertTokenizerFast(
        vocab={word: i for i, word in enumerate(vocabulary)}
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=24,
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, tied embeddings, a word a token, <s> before every text."""
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    folder = tmp_path_factory.mktemp("tiny-llama")
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
    ).save_pretrained(folder)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def settings(tiny_bert: Path, csv_file: Path, tmp_path: Path) -> dict[str, Any]:
    """Dotted keys of a short run; tests change what they are about."""
    return {
        "model.name": str(tiny_bert),
        "model.lora_rank": 2,
        "model.max_length": 16,
        "data.source": str(csv_file),
        "data.public": True,
        "data.validation_fraction": 0.2,
        "data.test_fraction": 0.2,
        "privacy.target_epsilon": 4.0,
        "optimizer.learning_rate": 1e-2,
        "training.expected_batch_size": 24,
        "training.steps": 6,
        "training.eval_every": 3,
        "training.precision": "float32",
        "training.run_dir": str(tmp_path / "run"),
    }


@pytest.fixture(autouse=True)
def what_runs_repeat_is_done_once(examined_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs here are of few models, again and again (repeated.py)."""
    import repeated

    repeated.patch(monkeypatch)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from idx_images import write_idx

    return write_idx(tmp_path_factory.mktemp("images"), compressed=True)


@pytest.fixture(scope="session")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved with its preprocessing, as models on the hub are."""
    from tiny_images import save_tiny_vit

    folder = save_tiny_vit(tmp_path_factory.mktemp("vit"))
    stated = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}}
    (folder / "preprocessor_config.json").write_text(
        json.dumps(stated | {"image_mean": MEAN, "image_std": STD})
    )
    return folder


@pytest.fixture(scope="session")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_images import save_tiny_resnet

    return save_tiny_resnet(tmp_path_factory.mktemp("resnet"))


@pytest.fixture
def model_of(vit: Path, resnet: Path) -> Any:
    """Builds "vit", "resnet" or one of our own models for images of a shape, with three labels."""

    import torch

    from quietgrad.training.tasks.images.models import load_image_classifier
    from quietgrad.training.tasks.loaded import Tuning

    def build(
        name: str, tune: Any, shape: tuple[int, ...] = (1, 8, 8), weights: str = "", **changes: Any
    ) -> Any:
        torch.manual_seed(0)
        folders = {"vit": f"image:{vit}", "resnet": f"image:{resnet}"}
        return load_image_classifier(
            folders.get(name, name), shape, 3, Tuning(tune, **({"lora_rank": 2} | changes)), weights
        )

    return build


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_images import write_class_folders

    return write_class_folders(tmp_path_factory.mktemp("pictures"))


@pytest.fixture
def values(pictures: Path, tmp_path: Path) -> dict[str, Any]:
    """Dotted keys of a short run on pictures; modules about other data have their own."""
    return {
        "model.lora_rank": 2,
        "data.public": True,
        "data.source": str(pictures),
        "data.image_size": 8,
        "data.validation_fraction": 0.2,
        "privacy.target_epsilon": 8.0,
        "optimizer.learning_rate": 0.1,
        "training.expected_batch_size": 24,
        "training.steps": 3,
        "training.precision": "float32",
        "training.run_dir": str(tmp_path / "run"),
    }


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Writes dotted keys as a TOML file."""

    def write(values: dict[str, Any]) -> Path:
        tables: dict[str, list[str]] = {}
        for name, value in values.items():
            table, key = name.split(".")
            tables.setdefault(table, []).append(f"{key} = {json.dumps(value)}")
        path = tmp_path / "config.toml"
        path.write_text(
            "".join(f"[{t}]\n" + "\n".join(lines) + "\n" for t, lines in tables.items()),
            encoding="utf-8",
        )
        return path

    return write


@pytest.fixture
def quietgrad(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process: (exit code, standard output, standard error)."""
    from quietgrad.cli.output import QUIET

    for name, value in QUIET.items():  # the command sets them; taken back after the test
        monkeypatch.setenv(name, value)

    def run(*arguments: object) -> tuple[int, str, str]:
        from quietgrad.cli import main

        monkeypatch.setattr(sys, "argv", ["quietgrad", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        code = ended.value.code
        return (0 if code is None else int(code)), captured.out, captured.err

    return run
