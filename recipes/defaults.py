"""The rule for settings left unset (docs/defaults.md) against the best that a search finds, on six
tasks.

    python recipes/defaults.py search --images FOLDER     # stops and resumes at any run
    python recipes/defaults.py rule --images FOLDER       # what the rule makes of each task
    python recipes/defaults.py final --images FOLDER      # rule and best, on fresh seeds
    python recipes/defaults.py report                  # table of docs/notes/defaults_tested.md

FOLDER holds Fashion-MNIST's four files; with the Debian package dataset-fashion-mnist it is
packaged:fashion-mnist, the default. Two data sets and a small language model are made in --work.
`try --task NAME --settings JSON` makes one run, which the search then counts too.

The search: random settings (rate, batch, steps, clipping norm, head's rate), one seed each, then
from the best in steps of 2, one setting at a time. The best few get two seeds more; the best by
mean validation score of three is the search's. Then rule and best are trained with three fresh
seeds. All records are public, seeds are known, and the choice is part of no epsilon. Every run is a
line of recipes/results/defaults.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from defaults_tasks import DefaultsTask, tasks

from quietgrad.comparing.runner import ComparisonRunner
from quietgrad.comparing.table import Comparison, ComparisonTable, Run
from quietgrad.training.derived.resolve import SHARE_OF_HOURS, resolved
from quietgrad.training.prepare import prepare

RESULTS = Path(__file__).with_name("results") / "defaults.jsonl"
BATCH, STEPS = "training.expected_batch_size", "training.steps"
RATE, HEAD_RATE = "optimizer.learning_rate", "optimizer.head_learning_rate"
NORM = "privacy.max_grad_norm"
TRIALS = 12
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
            same = line["kind"] == "run" and (line["task"], line["seed"]) == (self.name, seed)
            if same and line["settings"] == settings:
                return line
        others = tuple((key, value) for key, value in settings.items() if key != RATE)
        run = Run("baseline", self.task.epsilon, settings[RATE], seed, others, 0)
        made = self.runner.train(run)
        line = {
            "kind": "run",
            "task": self.name,
            "epsilon": self.task.epsilon,
            "settings": settings,
            "seed": seed,
            "validation": made["curve"][-1][1],
            "test": made["test"],
            "noise_multiplier": made["noise_multiplier"],
            "seconds": made["seconds"],
        }
        append(self.results, line)
        return line

    def rule(self) -> Settings:
        """What the rule makes of the task, whose examples stand for the hours."""
        given = self.comparison.config_of(self.comparison.first)
        prepared = prepare(given)
        machine = prepared.measured(prepared.sample())
        seconds = SHARE_OF_HOURS * 3600 * given.training.hours / self.task.examples
        asked = replace(
            given,
            training=replace(given.training, expected_batch_size=None, steps=None),
            optimizer=replace(given.optimizer, learning_rate=None),
        )
        units = len(prepared.task.record_ids)
        found, _ = resolved(asked, units, replace(machine, seconds=seconds, before=0.0))
        rate, head = found.optimizer.rate, found.optimizer.head_learning_rate
        batch, steps = found.training.expected_batch_size, found.training.steps
        assert batch is not None and steps is not None
        settings = {RATE: rate, BATCH: batch, STEPS: steps, NORM: found.privacy.max_grad_norm}
        settings |= {} if head is None else {HEAD_RATE: head}
        append(self.results, {"kind": "rule", "task": self.name, "settings": settings})
        return settings


def append(results: Path, line: dict[str, Any]) -> None:
    """Adds a line, and shows it."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


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


def neighbours(settings: Settings) -> Iterator[Settings]:
    """One setting halved or doubled."""
    for key in (RATE, STEPS, BATCH):
        for factor in (0.5, 2):
            value = settings[key] * factor
            other = settings | {key: value if key == RATE else int(value)}
            yield other | ({HEAD_RATE: settings[HEAD_RATE] * factor} if moved(key, other) else {})


def moved(key: str, settings: Settings) -> bool:
    """Whether the head's rate goes with the rate."""
    return key == RATE and HEAD_RATE in settings


def found(results: Path, name: str, seeds: tuple[int, ...]) -> list[tuple[float, float, Settings]]:
    """Mean validation and test score of every setting that has all the seeds, the best first."""
    runs: dict[str, dict[int, dict[str, Any]]] = {}
    for line in read(results):
        if line["kind"] == "run" and line["task"] == name:
            runs.setdefault(json.dumps(line["settings"]), {})[line["seed"]] = line
    means = [
        (
            statistics.fmean(made[seed]["validation"] for seed in seeds),
            statistics.fmean(made[seed]["test"] for seed in seeds),
            json.loads(settings),
        )
        for settings, made in runs.items()
        if all(seed in made for seed in seeds)
    ]
    return sorted(means, key=lambda mean: -mean[0])


def search(trainer: Trainer, trials: int, rounds: int) -> None:
    """Random settings, then steps from the best, then the best few with more seeds."""
    name, task, results = trainer.name, trainer.task, trainer.results
    for number in range(trials):
        trainer.score(trial(name, task, number), REPEATS[0])
    for _ in range(rounds):
        best = found(results, name, REPEATS[:1])[0][2]
        for other in neighbours(best):
            if other[BATCH] * other[STEPS] <= task.examples:
                trainer.score(other, REPEATS[0])
    for _, _, settings in found(results, name, REPEATS[:1])[:REPEATED]:
        for seed in REPEATS:
            trainer.score(settings, seed)


def rule_of(results: Path, name: str) -> Settings | None:
    """What was last noted of the rule."""
    noted = [x["settings"] for x in read(results) if x["kind"] == "rule" and x["task"] == name]
    return noted[-1] if noted else None


def report(results: Path) -> None:
    """A Markdown table of what is there. The search's row is the one that the fresh seeds like
    best, which flatters it.
    """
    print("| task | | rate | batch | steps | validation | test | settings tried |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in dict.fromkeys(line["task"] for line in read(results)):
        last, rule = found(results, name, FINAL_SEEDS), rule_of(results, name)
        tried = len(found(results, name, REPEATS[:1]))
        rows = {"search": last[:1], "rule": [row for row in last if row[2] == rule]}
        for which, row in ((which, row) for which, of in rows.items() for row in of):
            validation, test, settings = row
            cells = [name, which, f"{settings[RATE]:.3g}", settings[BATCH], settings[STEPS]]
            cells += [f"{validation:.3f}", f"{test:.3f}", tried if which == "search" else ""]
            print(f"| {' | '.join(map(str, cells))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("what", choices=["search", "rule", "final", "report", "try"])
    parser.add_argument("--images", default="packaged:fashion-mnist")
    parser.add_argument("--work", type=Path, default=Path("runs/defaults"))
    parser.add_argument("--task", action="append", help="one task alone; may be repeated")
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--rounds", type=int, default=2, help="of steps from the best")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--settings", help="JSON, for try")
    parser.add_argument("--seed", type=int, default=REPEATS[0], help="for try")
    chosen = parser.parse_args()
    if chosen.what == "report":
        report(chosen.results)
        return
    torch.set_num_threads(1)
    for name, task in tasks(chosen.work, chosen.images).items():
        if chosen.task and name not in chosen.task:
            continue
        trainer = Trainer(name, task(), chosen.results)
        if chosen.what == "search":
            search(trainer, chosen.trials, chosen.rounds)
        elif chosen.what == "rule":
            trainer.rule()
        elif chosen.what == "try":
            trainer.score(json.loads(chosen.settings), chosen.seed)
        else:
            best = found(chosen.results, name, REPEATS)[:1]
            for settings in (rule_of(chosen.results, name), *(s for _, _, s in best)):
                for seed in FINAL_SEEDS if settings is not None else ():
                    trainer.score(settings, seed)


if __name__ == "__main__":
    main()
