"""The tasks that the rule for unset settings is tested on (see defaults.py): what is trained on
what, which settings a search may try, and how many examples a run may take.

Two data sets and one small language model are made here, from fixed seeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

Tree = dict[str, dict[str, Any]]

MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
DATE_RECORDS, PUBLIC_STEPS, PUBLIC_BATCH = 8_000, 900, 128
TABLE_RECORDS = 10_000


@dataclass(frozen=True)
class DefaultsTask:
    """One task.

    Attributes:
        base: tables of the configuration that all runs share.
        epsilon: what runs are calibrated to.
        rates: lowest and highest learning rate that the search tries.
        batches, steps: what it tries; of these, what takes at most ``examples`` in all.
        examples: steps times batch at most: the hours allowed, in examples.
        head_ratios: the head's rate over the learning rate.
        norms: clipping norms.
    """

    base: Tree
    epsilon: float
    rates: tuple[float, float]
    batches: tuple[int, ...]
    steps: tuple[int, ...]
    examples: int
    head_ratios: tuple[float, ...] = (1.0,)
    norms: tuple[float, ...] = (0.1, 1.0, 10.0)
    evaluate: dict[str, int] = field(default_factory=dict)


def tasks(folder: Path, images: str) -> dict[str, Callable[[], DefaultsTask]]:
    """All of them, by name; what one needs and is not there yet is made in ``folder``.

    Args:
        folder: for made data.
        images: ``data.source`` of Fashion-MNIST.
    """
    tweets = {"source": "packaged:tweets"}
    return {
        "tweets, head": lambda: DefaultsTask(
            _base({"name": "packaged:minilm", "tune": "head", "max_length": 64}, tweets, 512),
            2.0,
            (3e-3, 0.5),
            (512, 1024, 2048, 4096, 8192),
            (40, 80, 150, 300, 600),
            620_000,
        ),
        "tweets, LoRA": lambda: DefaultsTask(
            _base(
                {"name": "packaged:minilm", "tune": "lora", "lora_layers": 1, "max_length": 12},
                tweets,
                128,
            ),
            3.0,
            (1e-3, 3e-2),
            (256, 512, 1024, 2048),
            (10, 20, 40, 80),
            30_000,
            (1.0, 3.0, 10.0),
        ),
        "table": lambda: DefaultsTask(
            _base(
                {"name": "table:mlp", "tune": "full"},
                {"source": str(made_table(folder / "table.csv")), "label": "outcome"},
                512,
            ),
            2.0,
            (5e-4, 0.1),
            (128, 256, 512, 1024, 2048, 4096),
            (50, 100, 200, 400, 800),
            400_000,
        ),
        "images, head": lambda: DefaultsTask(
            _base({"name": "features:random", "tune": "head"}, {"source": images}, 512),
            3.0,
            (1e-3, 0.5),
            (512, 1024, 2048, 4096, 8192),
            (40, 80, 150, 300),
            620_000,
        ),
        "digits, head": lambda: DefaultsTask(
            _base({"name": "features:random", "tune": "head"}, {"source": "packaged:digits"}, 512),
            3.0,
            (1e-3, 0.5),
            (64, 128, 256, 512, 1024),
            (40, 80, 150, 300),
            200_000,
        ),
        "answers, LoRA": lambda: DefaultsTask(
            _base(
                {
                    "name": str(made_language_model(folder / "language-model")),
                    "tune": "lora",
                    "lora_rank": 16,
                    "max_length": 32,
                },
                {"source": str(made_questions(folder / "dates.jsonl"))},
                128,
                {
                    "kind": "generate",
                    "prompt": "{question} =",
                    "answer": "{answer}",
                    "max_answer_length": 12,
                },
            ),
            3.0,
            (5e-4, 5e-2),
            (100, 200, 400, 800),
            (15, 30, 60, 120),
            12_000,
        ),
    }


def _base(model: dict[str, Any], data: dict[str, Any], at_once: int, task: Any = None) -> Tree:
    return {
        "model": model,
        "task": task or {},
        "data": {**data, "public": True},
        "optimizer": {"name": "adamw"},
        "performance": {"max_physical_batch_size": at_once},
        "training": {"device": "cpu"},
    }


def made_table(file: Path) -> Path:
    """Rows of five numbers and three columns of categories; two outcomes that follow from a sum, a
    product and a pair of categories, a tenth of them wrong.
    """
    if file.is_file():
        return file
    draw = np.random.default_rng(20)
    numbers = draw.normal(size=(TABLE_RECORDS, 5)) * [1, 10, 1, 1000, 1] + [0, 40, 0, 3000, 5]
    colours = draw.choice(["red", "green", "blue", "grey"], TABLE_RECORDS)
    towns = draw.choice([f"town {i}" for i in range(12)], TABLE_RECORDS)
    kinds = draw.choice(["new", "old"], TABLE_RECORDS, p=[0.3, 0.7])
    z = (numbers - [0, 40, 0, 3000, 5]) / [1, 10, 1, 1000, 1]
    towards = {f"town {i}": np.sin(1.7 * i) for i in range(12)}
    score = z[:, 0] + 0.8 * z[:, 1] * z[:, 2] - 0.5 * z[:, 3]
    score += np.array([towards[town] for town in towns])
    score += np.where((colours == "red") & (kinds == "new"), 1.5, 0.0)
    wrong = draw.random(TABLE_RECORDS) < 0.1
    outcome = np.where((score > 0) ^ wrong, "yes", "no")
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ["age,income,change,balance,visits,colour,town,kind,outcome"]
    for row, *words in zip(numbers, colours, towns, kinds, outcome, strict=True):
        lines.append(",".join([*(f"{x:.4f}" for x in row), *map(str, words)]))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def _dates(count: int, seed: int) -> list[tuple[int, int, int]]:
    draw = np.random.default_rng(seed)
    return [
        (int(draw.integers(1, 29)), int(draw.integers(12)), int(draw.integers(1900, 2100)))
        for _ in range(count)
    ]


def _digits(number: int, width: int) -> str:
    return " ".join(f"{number:0{width}d}")


def _asked(day: int, month: int, year: int, how: int) -> str:
    words = _digits(day, 2), MONTHS[month], _digits(year, 4)
    return " ".join((words, (words[1], words[0], words[2]), words[::-1])[how])


def made_questions(file: Path) -> Path:
    """The private task: dates with the month's name, to be answered year first."""
    if file.is_file():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as out:
        for i, (day, month, year) in enumerate(_dates(DATE_RECORDS, 21)):
            answer = f"{_digits(year, 4)} - {_digits(month + 1, 2)} - {_digits(day, 2)}"
            question = _asked(day, month, year, i % 3)
            out.write(json.dumps({"question": question, "answer": answer}) + "\n")
    return file


def made_language_model(folder: Path) -> Path:
    """A Llama of four layers, trained on public questions of the same kind whose answers come day
    first; the private answers' order is new to it.
    """
    if (folder / "config.json").is_file():
        return folder
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    names = [*special, *"0123456789", "-", ".", "=", *MONTHS]
    words = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    torch.manual_seed(22)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(names),
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )
    rows = []
    for i, (day, month, year) in enumerate(_dates(PUBLIC_STEPS * PUBLIC_BATCH, 23)):
        numbers = _digits(day, 2), _digits(month + 1, 2), _digits(year, 4)
        order = ((0, 1, 2), (1, 0, 2))[i // 3 % 2]  # day or month first; the sign says which
        answer = f" {'.-'[i // 3 % 2]} ".join(numbers[k] for k in order)
        rows.append([*words.encode(f"{_asked(day, month, year, i % 3)} = {answer}").ids, 2])
    tokens = torch.tensor(rows).view(PUBLIC_STEPS, PUBLIC_BATCH, -1)
    _pretrain(model, tokens)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
    ).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def _pretrain(model: nn.Module, tokens: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step, batch in enumerate(tokens):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50) * (1 - step / len(tokens))
        logits = model(input_ids=batch[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
