"""Many runs of one task that differ in a few settings: variants x epsilons x learning rates x
seeds, each run one line of a file, so a comparison stops and resumes anywhere.

Two protocols in one set of runs. *One rate*: every variant at the same learning rate. *Tuned*:
every variant at its own best rate of the grid, chosen by final validation accuracy over the first
seeds. With a [search] table there is only the second, and Optuna's trials take the grid's place. As
in the papers, the choice is not part of any epsilon; test accuracy is looked at for the chosen
settings only.

Each epsilon is that of its run alone, were its seed secret. Here seeds are known, runs on the same
records add up, and no ledger is kept: a comparison is for records that are public, or whose use for
tuning is accounted for elsewhere.

Data, model and cached states are prepared once; a run starts from the same initial parameters, and
a seed fixes batches and noise for all variants alike, so variants are compared seed by seed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.comparing.runner import ComparisonRunner
from quietgrad.comparing.search import RATE, propose
from quietgrad.comparing.table import Comparison, Run
from quietgrad.durable import whole_lines


def read_results(comparison: Comparison) -> dict[Run, dict[str, Any]]:
    """Finished runs whose settings are the configuration's."""
    found: dict[Run, dict[str, Any]] = {}
    for record in whole_lines(comparison.results):
        run = Run.of(record)
        fits = run.variant in comparison.variants and (run.trial is None) == (
            comparison.search is None
        )
        if fits and record["key"] == comparison.key_of(run):
            found[run] = record
    return found


def best_rate(
    comparison: Comparison, results: Mapping[Run, dict[str, Any]], variant: str, epsilon: float
) -> float | None:
    """The rate with the highest mean final validation accuracy over the tuning seeds; None before
    the grid is done.
    """
    table = comparison.table
    means = {}
    for rate in table.learning_rates:
        runs = [
            results.get(Run(variant, epsilon, rate, seed)) for seed in range(table.tuning_seeds)
        ]
        if any(r is None for r in runs):
            return None
        means[rate] = float(np.mean([r["curve"][-1][1] for r in runs if r is not None]))
    return max(means, key=means.__getitem__)


def chosen_run(
    comparison: Comparison, results: Mapping[Run, dict[str, Any]], variant: str, epsilon: float
) -> Run | None:
    """A variant's best settings at an epsilon, as its run of seed 0; None before grid or search are
    done.
    """
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
        tuned = sum(
            r.seed < table.tuning_seeds
            and r.trial is not None
            and r.trial < comparison.search.trials
            for r in results
            if (r.variant, r.epsilon) == (variant, epsilon)
        )
        best = chosen_run(comparison, results, variant, epsilon)
        final = (
            0
            if best is None
            else sum(_with_seed(best, s) in results for s in range(table.tuning_seeds, table.seeds))
        )
        left += trials - tuned + table.seeds - table.tuning_seeds - final
    return left


def open_runs(comparison: Comparison, results: Mapping[Run, dict[str, Any]]) -> list[Run]:
    """Runs that are still to be made and known now: the grid of the tuning seeds first, the rest
    once the rates are known; of a search the next trial of every study, or the seeds that are left
    for its best."""
    table = comparison.table
    if comparison.search is not None:
        return [
            run
            for study in _studies(comparison)
            for run in _open_of_study(comparison, results, *study)
        ]
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
            {
                table.protocol_rate,
                best_rate(comparison, results, variant, epsilon) or table.protocol_rate,
            }
        )
    ]
    return [run for run in rest if run not in results]


def run_comparison(
    comparison: Comparison,
    report: Callable[[Run, dict[str, Any], int], None],
    shard: tuple[int, int] = (0, 1),
    say: Callable[[str], None] = lambda stage: None,
    progress: Callable[[int, int, int, int], None] = lambda *counts: None,
) -> None:
    """Makes the runs that remain and appends each to the results file.

    Args:
        comparison: from ``load_comparison``.
        report: called after every run with the run, its record and how many are left of those
            known.
        shard: (i, n): of the runs that remain make the i-th of n parts, for several processes at
            once. A process whose part of the grid is done does not wait for the
            others: rates are chosen once the whole grid is there, so start it again for the seeds
            that are left.
        say: called with what begins before the first run, in a few words.
        progress: called after every step with (runs made now, runs known of, steps of this one
            made, all of them).
    """
    work, made = None, 0
    while True:
        todo = open_runs(comparison, read_results(comparison))
        mine = [run for run in todo if _share_of(comparison, run, shard[1]) == shard[0]]
        if not mine:
            return
        for left, run in zip(range(len(mine) - 1, -1, -1), mine, strict=True):
            if work is None:
                work = ComparisonRunner(comparison, say=say)
            record = work.train(run, partial(progress, made, made + left + 1))
            _append(comparison.results, record)
            made += 1
            report(run, record, left)


def _studies(comparison: Comparison) -> list[tuple[str, float]]:
    return [
        (variant, epsilon)
        for epsilon in comparison.table.epsilons
        for variant in comparison.variants
    ]


def _trials(
    comparison: Comparison, results: Mapping[Run, dict[str, Any]], variant: str, epsilon: float
) -> list[tuple[Run, float]]:
    """Finished trials of a study in order: the run of seed 0, and the mean of final validation
    accuracy over the tuning seeds.
    """
    by_trial: dict[int, dict[int, Run]] = {}
    for run in results:
        if (run.variant, run.epsilon) == (variant, epsilon) and run.trial is not None:
            by_trial.setdefault(run.trial, {})[run.seed] = run
    found: list[tuple[Run, float]] = []
    seeds = range(comparison.table.tuning_seeds)
    # More may be there, from when more were asked for.
    most = comparison.search.trials if comparison.search is not None else 0
    while (
        len(found) < most
        and len(found) in by_trial
        and all(s in by_trial[len(found)] for s in seeds)
    ):
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
    told = [
        (tuple(sorted({RATE: run.rate, **dict(run.settings)}.items())), value)
        for run, value in trials
    ]
    settings = dict(propose(search, variant, told))
    rate = float(settings.pop(RATE))
    rest = [
        Run(variant, epsilon, rate, s, tuple(settings.items()), len(trials))
        for s in range(table.tuning_seeds)
    ]
    return [run for run in rest if run not in results]


def _with_seed(run: Run, seed: int) -> Run:
    return replace(run, seed=seed)


def _share_of(comparison: Comparison, run: Run, count: int) -> int:
    if comparison.search is not None:
        return _studies(comparison).index((run.variant, run.epsilon)) % count
    return hashlib.sha256(json.dumps(run.record(), sort_keys=True).encode()).digest()[0] % count


def _append(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a kill has cut a line off: it keeps to itself
                file.write(b"\n")
        file.write(json.dumps(record).encode() + b"\n")
