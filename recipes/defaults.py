"""The rule for settings left unset (docs/defaults.md) against the best that a search finds, on six
tasks.

    python recipes/defaults.py search --images FOLDER     # stops and resumes at any run
    python recipes/defaults.py final --images FOLDER      # the rule and the best, on fresh seeds
    python recipes/defaults.py report                     # the table of docs/defaults.md

FOLDER holds Fashion-MNIST's four files; with the Debian package dataset-fashion-mnist it is
packaged:fashion-mnist, the default. Two data sets and a small language model are made in --work.

The search: random settings (rate, batch, steps, clipping norm, head's rate), one seed each, then
the best few again with two seeds more; the best by mean validation score is the search's. Then
rule and best are trained with three fresh seeds. All records are public, seeds are known, and the
choice is part of no epsilon. Every run is one line of recipes/results/defaults.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from defaults_tasks import DefaultsTask, tasks

from quietgrad.comparing.runner import ComparisonRunner
from quietgrad.comparing.table import Comparison, ComparisonTable, Run

RESULTS = Path(__file__).with_name("results") / "defaults.jsonl"
BATCH, STEPS = "training.expected_batch_size", "training.steps"
RATE, HEAD_RATE = "optimizer.learning_rate", "optimizer.head_learning_rate"
NORM = "privacy.max_grad_norm"
TRIALS = 24
REPEATED, REPEATS = 3, (0, 1, 2)  # the best so many trials, with these seeds
FINAL_SEEDS = (10, 11, 12)
NEVER = 10**6  # steps between evaluations

Settings = dict[str, float]


class Trainer:
    """Makes runs of one task; data, model and cached states are prepared once."""

    def __init__(self, name: str, task: DefaultsTask, results: Path) -> None:
        self.name, self.task, self.results = name, task, results
        rate = task.rates[0]
        table = ComparisonTable(
            epsilons=[task.epsilon],
            learning_rates=[rate],
            protocol_rate=rate,
            eval_every=NEVER,
        )
        base = {table: dict(values) for table, values in task.base.items()}
        base["training"] |= {"expected_batch_size": 64, "steps": 10}
        self.comparison = Comparison(Path("defaults.toml"), table, {"baseline": {}}, base)
        self._runner: ComparisonRunner | None = None

    @property
    def runner(self) -> ComparisonRunner:
        if self._runner is None:
            self._runner = ComparisonRunner(self.comparison)
        return self._runner

    def score(self, settings: Settings, seed: int) -> dict[str, Any]:
        """The line of a run, made if it is not there."""
        for line in read(self.results):
            same = (line["task"], line["seed"]) == (self.name, seed)
            if same and line["settings"] == settings:
                return line
        others = tuple((key, value) for key, value in settings.items() if key != RATE)
        run = Run("baseline", self.task.epsilon, settings[RATE], seed, others, 0)
        made = self.runner.train(run)
        line = {
            "task": self.name,
            "epsilon": self.task.epsilon,
            "settings": settings,
            "seed": seed,
            "validation": made["curve"][-1][1],
            "test": made["test"],
            "noise_multiplier": made["noise_multiplier"],
            "seconds": made["seconds"],
        }
        self.results.parent.mkdir(parents=True, exist_ok=True)
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        return line


def read(results: Path) -> list[dict[str, Any]]:
    """Finished runs."""
    if not results.is_file():
        return []
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def trial(name: str, task: DefaultsTask, number: int) -> Settings:
    """The search's settings of one trial; the same whichever were made before."""
    draw = np.random.default_rng([number, *name.encode()])
    low, high = np.log(task.rates)
    sizes = [(b, t) for b in task.batches for t in task.steps if b * t <= task.examples]
    batch, steps = sizes[draw.integers(len(sizes))]
    rate = float(f"{np.exp(draw.uniform(low, high)):.2g}")
    found: Settings = {RATE: rate, BATCH: batch, STEPS: steps, NORM: float(draw.choice(task.norms))}
    ratio = float(draw.choice(task.head_ratios))
    return found if ratio == 1 else found | {HEAD_RATE: rate * ratio}


def mean_score(lines: list[dict[str, Any]], part: str = "validation") -> float:
    return statistics.fmean(line[part] for line in lines)


def search(trainer: Trainer, trials: int) -> Settings:
    """The best settings of the search."""
    found = [trial(trainer.name, trainer.task, number) for number in range(trials)]
    first = sorted(found, key=lambda s: -trainer.score(s, REPEATS[0])["validation"])
    return max(
        first[:REPEATED],
        key=lambda s: mean_score([trainer.score(s, seed) for seed in REPEATS]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("what", choices=["search", "final", "report", "try"])
    parser.add_argument("--images", default="packaged:fashion-mnist")
    parser.add_argument("--work", type=Path, default=Path("runs/defaults"))
    parser.add_argument("--task", action="append", help="one task alone; may be repeated")
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--settings", help="JSON, for try")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for name, task in tasks(chosen.work, chosen.images).items():
        if chosen.task and name not in chosen.task:
            continue
        trainer = Trainer(name, task(), chosen.results)
        started = time.monotonic()
        if chosen.what == "search":
            best: Mapping[str, float] = search(trainer, chosen.trials)
            print(name, "best", best, f"{time.monotonic() - started:.0f} s", flush=True)
        if chosen.what == "try":
            trainer.score(json.loads(chosen.settings), 0)


if __name__ == "__main__":
    main()
