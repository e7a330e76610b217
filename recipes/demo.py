"""The demo over several seeds, with and without privacy: what docs/demo.md says of it.

    python recipes/demo.py run [--seeds 3] [--features FILE.pt]
    python recipes/demo.py figure [--features FILE.pt]
    python recipes/demo.py report

``run`` makes the runs that recipes/results/demo.jsonl lacks, each by the code of ``quietgrad
train`` with the embedded default; they differ in their seed, and the reference has
privacy.enabled=false at the settings of the private run. Seeds are fixed here so that the runs can
be made again: the tweets are published, and declared public for this script. What the frozen
encoder makes of the texts is a fixed function of them, and is computed once for all runs;
``--features`` keeps it for another call. ``figure`` makes the first run again and draws
docs/demo_layers.png; ``report`` prints the table.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from quietgrad.training import runner
from quietgrad.training.files.figure import score_figure
from quietgrad.training.files.run_dir import open_run_dir
from quietgrad.training.prepare import Prepared, prepare
from quietgrad.training.settings.config import load_config
from quietgrad.training.tasks.records import outputs
from quietgrad.training.tasks.task import FinalScores
from quietgrad.training.tasks.text.prefix_cache import PrefixCache, UpperBlocks
from quietgrad.training.tasks.text.task import TextTask

RESULTS = Path(__file__).with_name("results") / "demo.jsonl"
FIGURE = Path(__file__).parents[1] / "docs" / "demo_layers.png"
KINDS = ("private", "reference")


class KeptFeatures:
    """``Task.cache`` that computes each part's features once, for all runs of a process."""

    def __init__(self, file: Path | None) -> None:
        """Reads what an earlier call kept."""
        self.file = file
        self.known = torch.load(file) if file is not None and file.is_file() else {}
        self.seconds = 0.0

    def cache(self, task: TextTask, *given: Any) -> PrefixCache | None:
        """See ``Task.cache``; parts are told apart by how many records they have."""
        classifier, texts = given[1], given[2]
        key = f"{classifier.pooling}-{len(texts)}"
        if key not in self.known:
            started = time.perf_counter()
            made = TextTask.cache(task, *given)
            assert made is not None and made.pooled
            if len(texts) < 1000:  # a forecast's sample
                return made
            self.seconds += time.perf_counter() - started
            self.known[key] = (made.states, made.offsets.tolist())
            if self.file is not None:
                torch.save(self.known, self.file)
        states, offsets = self.known[key]
        upper = UpperBlocks([], classifier.head)
        return PrefixCache(upper, states, torch.tensor(offsets).numpy(), texts, True)


def scored(task: TextTask, kept: KeptFeatures, *given: Any, **more: Any) -> FinalScores:
    """``Task.final_scores`` from kept features of the test records, too."""
    config, model, validation, test, device = given
    cache = kept.cache(task, config, model.classifier, test, validation, device)
    assert cache is not None
    logits = outputs(cache.upper, test, 512, device, source=cache)
    score = task.metric(validation)
    own = outputs(
        more["cached_validation"].upper, validation, 512, device, source=more["cached_validation"]
    )
    return FinalScores(
        {
            "accuracy": score(logits, test.labels),
            "validation_accuracy": score(own, validation.labels),
        }
    )


def one(
    kind: str,
    seed: int,
    overrides: list[str],
    kept: KeptFeatures,
    figure: Path | None = None,
    reference: float | None = None,
) -> dict[str, Any]:
    """One run, as ``quietgrad train`` makes it, and its figure where one is asked for."""
    config = load_config(None, [*overrides, f"training.seed={seed}", "data.public=true"])
    prepared: Prepared = prepare(config)
    task: Any = prepared.task
    task.cache = lambda *given: kept.cache(task, *given)
    task.final_scores = lambda *given, **more: scored(task, kept, *given, **more)
    started, before = time.perf_counter(), kept.seconds
    with tempfile.TemporaryDirectory() as folder:
        run_dir = open_run_dir(folder, False)
        found = runner.train(prepared, run_dir, False, lambda progress: None).result
        if figure is not None:
            score_figure(run_dir.read_metrics(), found, reference, figure)
    training = prepared.config.training
    return {
        "kind": kind,
        "seed": seed,
        "epsilon": found["epsilon"],
        "delta": found["delta"],
        **found["metrics"],
        "majority": found["majority_accuracy"],
        "counted": found["scored_records"],
        "records": found["records"],
        "trainable_parameters": found["trainable_parameters"],
        "learning_rate": prepared.config.optimizer.learning_rate,
        "batch": training.expected_batch_size,
        "steps": training.steps,
        "seconds_without_features": round(
            time.perf_counter() - started - (kept.seconds - before), 1
        ),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }


def run(seeds: int, features: Path | None, overrides: list[str], results: Path) -> None:
    """Makes the runs that are missing."""
    kept = KeptFeatures(features)
    rows = read(results)
    for seed in range(1, seeds + 1):
        for kind in KINDS:
            if any(row["kind"] == kind and row["seed"] == seed for row in rows):
                continue
            more = [] if kind == "private" else ["privacy.enabled=false", *settings_of(rows)]
            row = one(kind, seed, [*overrides, *more], kept)
            rows.append(row)
            with open(results, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def draw(features: Path | None, overrides: list[str], results: Path) -> None:
    """Makes the first private run again, and its figure."""
    known = [row["accuracy"] for row in read(results) if row["kind"] == "reference"]
    mean = statistics.mean(known) if known else None
    one("private", 1, overrides, KeptFeatures(features), FIGURE, mean)


def settings_of(rows: list[dict[str, Any]]) -> list[str]:
    """The private run's, which its reference takes over."""
    first = next(row for row in rows if row["kind"] == "private")
    return [
        f"learning_rate={first['learning_rate']}",
        f"expected_batch_size={first['batch']}",
        f"steps={first['steps']}",
    ]


def read(results: Path) -> list[dict[str, Any]]:
    """The runs that there are."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.is_file() else []
    return [json.loads(line) for line in lines]


def report(results: Path) -> str:
    """A table in Markdown."""
    rows = read(results)
    lines = ["| | validation accuracy | test accuracy |", "| --- | --- | --- |"]
    for kind in KINDS:
        chosen = [row for row in rows if row["kind"] == kind]
        cells = [
            f"{statistics.mean(found):.4f} ({min(found):.4f} to {max(found):.4f})"
            for key in ("validation_accuracy", "accuracy")
            if (found := [row[key] for row in chosen])
        ]
        lines.append(f"| {kind}, {len(chosen)} seeds | {' | '.join(cells)} |")
    first = rows[0]
    lines.append(f"| majority class | | {first['majority']:.4f} |")
    return "\n".join(lines)


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description="The demo over several seeds.")
    parser.add_argument("action", choices=["run", "figure", "report"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--features", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    asked = parser.parse_args()
    if asked.action == "run":
        run(asked.seeds, asked.features, asked.overrides, asked.results)
    if asked.action == "figure":
        draw(asked.features, asked.overrides, asked.results)
    print(report(asked.results))


if __name__ == "__main__":
    main()
