"""Many runs of one task that differ in a few settings: variants x epsilons x learning rates x seeds, each run one line of a file, so a comparison stops and resumes anywhere.

Two protocols in one set of runs (with a [search] table only the second, and Optuna's trials in the place of the grid). *One rate*: every variant at the same learning rate. *Tuned*: every variant at its own best rate of the grid, chosen by final validation
accuracy over the first seeds. As in the papers, that choice is not part of any epsilon; test accuracy is looked at for the chosen rates only.

Each epsilon is that of its run alone, were its seed secret. Here seeds are known, runs on the same records add up, and no ledger is kept: a comparison is for records that are
public, or whose use for tuning is accounted for elsewhere.

Data, model and cached states are prepared once; a run starts from the same initial parameters, and a seed fixes batches and noise for all variants alike, so variants are
compared seed by seed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import typing
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.checks import nearest, require_at_least, require_positive
from quietgrad.training.config import TrainConfig, config_from, read_toml
from quietgrad.training.search import RATE, SearchTable, Settings, propose, search_table

# Tables and keys that configurations gained after the first results were committed.
LATER = (
    "noise",
    "noise.horizon",
    "noise.clamp",
    "data.image_size",
    "data.public_fraction",
    "data.label_separator",
    "data.no_label",
    "model.weights",
    "optimizer.schedule",
)
# What a run of before did, where that is not today's default.
BEFORE = {"noise.clamp": 2.0}
# What a variant may change; the rest is prepared once for all runs.
VARIED_TABLES = ("privacy", "clipping", "noise", "denoising", "optimizer")
FIXED = ("privacy.target_epsilon", "privacy.noise_multiplier", "privacy.target_delta")
VARIED_KEYS = ("training.expected_batch_size", "training.steps", "training.epochs")


@dataclass(frozen=True)
class ComparisonTable:
    """What is compared.

    Attributes:
        title: of the figure.
        results: file of finished runs, beside the configuration.
        figure: PNG, beside the configuration.
        epsilons: one panel each.
        seeds: how many, 0 .. seeds - 1.
        learning_rates: the grid.
        tuning_seeds: the first so many run the whole grid; the others the chosen rates alone.
        protocol_rate: the rate of the one-rate protocol; in the grid.
        head_rate: learning rate of the head as a multiple of the learning rate (0: the configuration's own, fixed).
        reference: the variant that the others are compared with.
        shares: of the reference's final accuracy, whose first crossing is counted in steps.
        eval_every, eval_records: steps between evaluations, validation records used for them (0: all).
    """

    title: str = ""
    results: str = "results.jsonl"
    figure: str = "comparison.png"
    epsilons: list[float] = field(default_factory=lambda: [3.0])
    seeds: int = 3
    learning_rates: list[float] = field(default_factory=lambda: [1e-3])
    tuning_seeds: int = 2
    protocol_rate: float = 1e-3
    head_rate: float = 0.0
    reference: str = "baseline"
    shares: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eval_every: int = 5
    eval_records: int = 0


@dataclass(frozen=True)
class Run:
    """One training run of a comparison.

    Attributes:
        variant, epsilon, rate, seed: which.
        settings: what a search found, beside the rate.
        trial: its number in a search; None on a grid.
    """

    variant: str
    epsilon: float
    rate: float
    seed: int
    settings: Settings = ()
    trial: int | None = None

    def record(self) -> dict[str, Any]:
        """As it is written: what a grid does not have is left out."""
        return {k: v for k, v in asdict(self).items() if not (k in ("settings", "trial") and self.trial is None)}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Run:
        settings = tuple((key, value) for key, value in record.get("settings", ()))
        return cls(record["variant"], record["epsilon"], record["rate"], record["seed"], settings, record.get("trial"))


@dataclass(frozen=True)
class Comparison:
    """A configuration read from a file.

    Attributes:
        path: the file.
        table: what is compared.
        variants: name -> {"table.key": value} that the variant changes.
        base: nested dictionaries of the settings all runs share.
        search: what is searched; None for a grid.
    """

    path: Path
    table: ComparisonTable
    variants: dict[str, dict[str, Any]]
    base: dict[str, Any]
    search: SearchTable | None = None

    @property
    def first(self) -> Run:
        """A run that every process has: what is prepared for it serves all."""
        return Run(self.table.reference, self.table.epsilons[0], self.table.protocol_rate, 0)

    @property
    def results(self) -> Path:
        return Path(os.path.normpath(self.path.parent / self.table.results))

    @property
    def figure(self) -> Path:
        return Path(os.path.normpath(self.path.parent / self.table.figure))

    def config_of(self, run: Run) -> TrainConfig:
        """The whole configuration of one run."""
        tree = {name: dict(values) for name, values in self.base.items()}
        for name, value in (*self.variants[run.variant].items(), *run.settings):
            table, _, key = name.partition(".")
            tree.setdefault(table, {})[key] = value
        optimizer = tree.setdefault("optimizer", {})
        optimizer["learning_rate"] = run.rate
        if self.table.head_rate:
            optimizer["head_learning_rate"] = run.rate * self.table.head_rate
        privacy = tree.setdefault("privacy", {})
        privacy["target_epsilon"] = run.epsilon
        privacy.pop("noise_multiplier", None)
        tree.setdefault("training", {})["seed"] = run.seed
        return config_from(tree)

    def key_of(self, run: Run) -> str:
        """Changes with every setting that can change the outcome."""
        tree = self.config_of(run).to_dict()
        default = TrainConfig().to_dict()
        for name in LATER:  # at their defaults they change nothing, and results of before they came stay valid
            table, _, key = name.partition(".")
            idle = name == "noise.clamp" and tree.get("noise", {}).get("method") != "noisecurve"
            if key and (idle or tree.get(table, {}).get(key) == BEFORE.get(name, default[table].get(key))):
                tree.get(table, {}).pop(key, None)
            elif not key and tree[table] == default[table]:
                tree.pop(table)
        tree.pop("spectrum", None)  # training does not read it
        settings = [tree, self.table.eval_every, self.table.eval_records]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def load_comparison(path: str | Path) -> Comparison:
    """Reads and checks a comparison.

    Raises:
        ValueError: missing or malformed file, unknown table or key, a variant or protocol that does not fit, naming it and the remedy.
    """
    file, tree = Path(path), read_toml(path)
    if "comparison" not in tree or "variants" not in tree:
        raise ValueError(
            f"config={str(file)!r} has no [comparison] or no [variants.NAME] table; `quietgrad train` takes single runs"
        )
    given = tree.pop("comparison")
    table = _table(given)
    variants = {name: _flat(values) for name, values in tree.pop("variants").items()}
    search = search_table(tree.pop("search"), list(variants)) if "search" in tree else None
    if search is not None and ("learning_rates" in given or "protocol_rate" in given):
        raise ValueError(
            "comparison.learning_rates and protocol_rate are a grid, and [search] takes its place; keep one of the two"
        )
    if table.reference not in variants:
        raise ValueError(f"comparison.reference={table.reference!r} is no variant{nearest(table.reference, variants)}")
    if table.protocol_rate not in table.learning_rates:
        raise ValueError(
            f"comparison.protocol_rate={table.protocol_rate} is not in learning_rates={table.learning_rates}; add it to the grid"
        )
    require_at_least("comparison.tuning_seeds", table.tuning_seeds, 1, "choose rates with at least one seed")
    require_at_least("comparison.seeds", table.seeds, table.tuning_seeds, "there are fewer seeds than tuning seeds")
    for value in (*table.epsilons, *table.learning_rates):
        require_positive("comparison.epsilons and learning_rates", value)
    found = Comparison(file, table, variants, tree, search)
    for variant, changed in variants.items():
        searched = tuple((r.key, (r.choices or (r.low,))[0]) for r in (search.ranges_of(variant) if search else ()))
        named = [(f"variants.{variant}.{name}", name) for name in changed]
        for shown, name in named + [(f'search.ranges."{key}"', key) for key, _ in searched]:
            if name in FIXED or (name.partition(".")[0] not in VARIED_TABLES and name not in VARIED_KEYS):
                raise ValueError(
                    f"{shown} cannot vary: data, model and cached states are shared by all runs; vary one of "
                    f"{', '.join((*VARIED_TABLES, *VARIED_KEYS))}, or make a comparison of its own"
                )
        settings = tuple((key, value) for key, value in searched if key != RATE)
        config = found.config_of(Run(variant, table.epsilons[0], table.protocol_rate, 0, settings))
        if not config.privacy.enabled:
            raise ValueError(
                "privacy.enabled=false: a comparison has an epsilon for every run; use `quietgrad train` for a reference without privacy"
            )
    return found


def _table(values: dict[str, Any]) -> ComparisonTable:
    hints = typing.get_type_hints(ComparisonTable)
    for key, value in values.items():
        if key not in hints:
            raise ValueError(f"unknown key comparison.{key}{nearest(key, hints)}")
        wanted = typing.get_origin(hints[key]) or hints[key]
        if isinstance(value, bool) or not isinstance(value, (int, float) if wanted is float else wanted):
            raise ValueError(f"comparison.{key}={value!r} must be of type {getattr(wanted, '__name__', wanted)}")
    return ComparisonTable(**values)


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """{"denoising": {"method": "paper"}} to {"denoising.method": "paper"}."""
    for table, keys in values.items():
        if not isinstance(keys, dict):
            raise ValueError(f"variants: {table}={keys!r} must be a key of a table, such as denoising.method")
    return {f"{table}.{key}": value for table, keys in values.items() for key, value in keys.items()}


def read_results(comparison: Comparison) -> dict[Run, dict[str, Any]]:
    """Finished runs whose settings are the configuration's."""
    found: dict[Run, dict[str, Any]] = {}
    if comparison.results.is_file():
        for line in comparison.results.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            run = Run.of(record)
            fits = run.variant in comparison.variants and (run.trial is None) == (comparison.search is None)
            if fits and record["key"] == comparison.key_of(run):
                found[run] = record
    return found


def best_rate(
    comparison: Comparison, results: Mapping[Run, dict[str, Any]], variant: str, epsilon: float
) -> float | None:
    """The rate with the highest mean final validation accuracy over the tuning seeds; None before the grid is done."""
    table = comparison.table
    means = {}
    for rate in table.learning_rates:
        runs = [results.get(Run(variant, epsilon, rate, seed)) for seed in range(table.tuning_seeds)]
        if any(r is None for r in runs):
            return None
        means[rate] = float(np.mean([r["curve"][-1][1] for r in runs if r is not None]))
    return max(means, key=means.__getitem__)


def chosen_run(
    comparison: Comparison, results: Mapping[Run, dict[str, Any]], variant: str, epsilon: float
) -> Run | None:
    """A variant's best settings at an epsilon, as its run of seed 0; None before grid or search are done."""
    if comparison.search is None:
        rate = best_rate(comparison, results, variant, epsilon)
        return None if rate is None else Run(variant, epsilon, rate, 0)
    trials = _trials(comparison, results, variant, epsilon)
    if len(trials) < comparison.search.trials:
        return None
    return max(trials, key=lambda trial: trial[1])[0]


def runs_left(comparison: Comparison, results: Mapping[Run, dict[str, Any]]) -> int:
    """How many runs are still to be made, those of a search that are not known yet included."""
    table = comparison.table
    if comparison.search is None:
        return len(open_runs(comparison, results))
    left = 0
    for variant, epsilon in _studies(comparison):
        trials = comparison.search.trials * table.tuning_seeds
        tuned = sum(r.seed < table.tuning_seeds for r in results if (r.variant, r.epsilon) == (variant, epsilon))
        best = chosen_run(comparison, results, variant, epsilon)
        final = (
            0 if best is None else sum(_with_seed(best, s) in results for s in range(table.tuning_seeds, table.seeds))
        )
        left += trials - tuned + table.seeds - table.tuning_seeds - final
    return left


def open_runs(comparison: Comparison, results: Mapping[Run, dict[str, Any]]) -> list[Run]:
    """Runs that are still to be made and known now: the grid of the tuning seeds first, the rest once the rates are known; of a search the next trial of every study, or
    the seeds that are left for its best."""
    table = comparison.table
    if comparison.search is not None:
        return [run for study in _studies(comparison) for run in _open_of_study(comparison, results, *study)]
    grid = [
        Run(variant, epsilon, rate, seed)
        for seed in range(table.tuning_seeds)
        for epsilon in table.epsilons
        for rate in table.learning_rates
        for variant in comparison.variants
    ]
    todo = [run for run in grid if run not in results]
    if todo:
        return todo
    rest = [
        Run(variant, epsilon, rate, seed)
        for seed in range(table.tuning_seeds, table.seeds)
        for epsilon in table.epsilons
        for variant in comparison.variants
        for rate in sorted(
            {table.protocol_rate, best_rate(comparison, results, variant, epsilon) or table.protocol_rate}
        )
    ]
    return [run for run in rest if run not in results]


def run_comparison(
    comparison: Comparison, report: Callable[[Run, dict[str, Any], int], None], shard: tuple[int, int] = (0, 1)
) -> None:
    """Makes the runs that remain and appends each to the results file.

    Args:
        comparison: from ``load_comparison``.
        report: called after every run with the run, its record and how many are left of those known.
        shard: (i, n): of the runs that remain make the i-th of n parts, for several processes at once. A process whose part of the grid is done does not wait for the
            others: rates are chosen once the whole grid is there, so start it again for the seeds that are left.
    """
    work: Any = None
    while True:
        todo = open_runs(comparison, read_results(comparison))
        mine = [run for run in todo if _share_of(comparison, run, shard[1]) == shard[0]]
        if not mine:
            return
        for left, run in zip(range(len(mine) - 1, -1, -1), mine, strict=True):
            if work is None:
                from quietgrad.training.workbench import Workbench  # here: it is built on this module

                work = Workbench(comparison)
            record = work.train(run)
            _append(comparison.results, record)
            report(run, record, left)


def _studies(comparison: Comparison) -> list[tuple[str, float]]:
    return [(variant, epsilon) for epsilon in comparison.table.epsilons for variant in comparison.variants]


def _trials(
    comparison: Comparison, results: Mapping[Run, dict[str, Any]], variant: str, epsilon: float
) -> list[tuple[Run, float]]:
    """Finished trials of a study in order: the run of seed 0, and the mean of final validation accuracy over the tuning seeds."""
    by_trial: dict[int, dict[int, Run]] = {}
    for run in results:
        if (run.variant, run.epsilon) == (variant, epsilon) and run.trial is not None:
            by_trial.setdefault(run.trial, {})[run.seed] = run
    found: list[tuple[Run, float]] = []
    seeds = range(comparison.table.tuning_seeds)
    while len(found) in by_trial and all(s in by_trial[len(found)] for s in seeds):
        runs = by_trial[len(found)]
        found.append((runs[0], float(np.mean([results[runs[s]]["curve"][-1][1] for s in seeds]))))
    return found


def _open_of_study(
    comparison: Comparison, results: Mapping[Run, dict[str, Any]], variant: str, epsilon: float
) -> list[Run]:
    table, search = comparison.table, comparison.search
    assert search is not None
    best = chosen_run(comparison, results, variant, epsilon)
    if best is not None:
        rest = [_with_seed(best, seed) for seed in range(table.tuning_seeds, table.seeds)]
        return [run for run in rest if run not in results]
    trials = _trials(comparison, results, variant, epsilon)
    told = [(tuple(sorted({RATE: run.rate, **dict(run.settings)}.items())), value) for run, value in trials]
    settings = dict(propose(search, variant, told))
    rate = float(settings.pop(RATE))
    rest = [Run(variant, epsilon, rate, s, tuple(settings.items()), len(trials)) for s in range(table.tuning_seeds)]
    return [run for run in rest if run not in results]


def _with_seed(run: Run, seed: int) -> Run:
    return replace(run, seed=seed)


def _share_of(comparison: Comparison, run: Run, count: int) -> int:
    if comparison.search is not None:
        return _studies(comparison).index((run.variant, run.epsilon)) % count
    return hashlib.sha256(json.dumps(run.record(), sort_keys=True).encode()).digest()[0] % count


def _append(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(record) + "\n")
