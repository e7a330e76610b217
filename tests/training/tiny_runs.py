"""Helpers of the training tests: a small data set that a tiny model can learn, and short runs on
it, stopped where a test wants.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quietgrad.training import runner
from quietgrad.training.files.noise_state import saved_mixing, with_kept_seed
from quietgrad.training.files.run_dir import RunDir, open_run_dir
from quietgrad.training.prepare import Prepared, prepare
from quietgrad.training.settings.config import TrainConfig, config_from

WORDS = {"good": ["lovely", "great", "superb", "bright"], "bad": ["awful", "dull", "poor", "grim"]}
COMMON = [
    "the",
    "film",
    "was",
    "a",
    "story",
    "actor",
    "very",
    "and",
    "quite",
    "with",
    "plot",
    "music",
]
# Of the tiny language model, a word a token.
VOCABULARY = [
    "<pad>",
    "<s>",
    "</s>",
    "<unk>",
    ":",
    *COMMON,
    *WORDS["good"],
    *WORDS["bad"],
    "good",
    "bad",
]
RECORDS = 120


def write_records(path: Path, records: list[tuple[str, str]]) -> Path:
    lines = ["text,label"] + [f'"{text}",{label}' for text, label in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def labelled_texts(count: int = RECORDS) -> list[tuple[str, str]]:
    generator = np.random.default_rng(0)
    records = []
    for i in range(count):
        label = ("good", "bad")[i % 2]
        words = [
            *generator.choice(COMMON, generator.integers(3, 9)),
            *generator.choice(WORDS[label], 2),
        ]
        generator.shuffle(words)
        records.append((" ".join(words), label))
    return records


def config_of(values: dict[str, Any]) -> TrainConfig:
    tree: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        table, key = name.split(".")
        tree.setdefault(table, {})[key] = value
    return config_from(tree)


def train(
    values: dict[str, Any],
    resume: bool = False,
    report: Callable[[runner.Progress], None] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Prepared, runner.Outcome, RunDir]:
    config = config_of(values)
    run_dir = open_run_dir(config.training.run_dir, resume)
    if resume:
        config = with_kept_seed(config, run_dir)
    prepared = prepare(config, saved_mixing(run_dir) if resume else None)
    return (
        prepared,
        runner.train(prepared, run_dir, resume, report or (lambda progress: None), say),
        run_dir,
    )


def weights(prepared: Prepared) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in prepared.model.classifier.named_parameters()}


def interrupt_at(step: int) -> Callable[[runner.Progress], None]:
    """A Ctrl-C right after a step."""

    def report(progress: runner.Progress) -> None:
        if progress.step == step:
            signal.raise_signal(signal.SIGINT)

    return report


def crash_at(step: int) -> Callable[[runner.Progress], None]:
    def report(progress: runner.Progress) -> None:
        if progress.step == step:
            raise OSError("the machine went away")

    return report
