"""Many runs of one task that differ in a few settings: variants x epsilons x learning rates x seeds, each run one line of a file, so a comparison stops and resumes anywhere.

Two protocols in one set of runs. *One rate*: every variant at the same learning rate. *Tuned*: every variant at its own best rate of the grid, chosen by final validation
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
import time
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quietgrad.checks import nearest, require_at_least, require_positive
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.noise.mixing import MixingMatrix
from quietgrad.plan import PrivacyPlan
from quietgrad.tensors import trainable_parameters
from quietgrad.training.config import TrainConfig, config_from, read_toml
from quietgrad.training.noise_settings import check_spectrum
from quietgrad.training.optimizers import build_denoiser, build_optimizer, step_on_release
from quietgrad.training.prefix_cache import PrefixCache
from quietgrad.training.prepare import build_plan, precision_context, prepare
from quietgrad.training.records import Records, logits_of, spread

EVALUATION_BATCH = 256
# Tables and keys that configurations gained after the first results were committed.
LATER = ("noise", "noise.horizon", "data.image_size", "data.public_fraction", "model.weights", "optimizer.schedule")
# What a variant may change; the rest is prepared once for all runs.
VARIED_TABLES = ("privacy", "clipping", "noise", "denoising", "optimizer")
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
    """One training run of a comparison."""

    variant: str
    epsilon: float
    rate: float
    seed: int


@dataclass(frozen=True)
class Comparison:
    """A configuration read from a file.

    Attributes:
        path: the file.
        table: what is compared.
        variants: name -> {"table.key": value} that the variant changes.
        base: nested dictionaries of the settings all runs share.
    """

    path: Path
    table: ComparisonTable
    variants: dict[str, dict[str, Any]]
    base: dict[str, Any]

    @property
    def results(self) -> Path:
        return Path(os.path.normpath(self.path.parent / self.table.results))

    @property
    def figure(self) -> Path:
        return Path(os.path.normpath(self.path.parent / self.table.figure))

    def config_of(self, run: Run) -> TrainConfig:
        """The whole configuration of one run."""
        tree = {name: dict(values) for name, values in self.base.items()}
        for name, value in self.variants[run.variant].items():
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
            if key and tree.get(table, {}).get(key) == default[table].get(key):
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
    table = _table(tree.pop("comparison"))
    variants = {name: _flat(values) for name, values in tree.pop("variants").items()}
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
    found = Comparison(file, table, variants, tree)
    for variant, changed in variants.items():
        for name in changed:
            if name.partition(".")[0] not in VARIED_TABLES and name not in VARIED_KEYS:
                raise ValueError(
                    f"variants.{variant}.{name} cannot vary: data, model and cached states are shared by all runs; vary one of "
                    f"{', '.join((*VARIED_TABLES, *VARIED_KEYS))}, or make a comparison of its own"
                )
        config = found.config_of(Run(variant, table.epsilons[0], table.protocol_rate, 0))
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
            run = Run(record["variant"], record["epsilon"], record["rate"], record["seed"])
            if run.variant in comparison.variants and record["key"] == comparison.key_of(run):
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


def open_runs(comparison: Comparison, results: Mapping[Run, dict[str, Any]]) -> list[Run]:
    """Runs that are still to be made, the grid of the tuning seeds first; the rest once the rates are known."""
    table = comparison.table
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
    work: Workbench | None = None
    while True:
        todo = open_runs(comparison, read_results(comparison))
        mine = [run for run in todo if _share_of(run, shard[1]) == shard[0]]
        if not mine:
            return
        for left, run in zip(range(len(mine) - 1, -1, -1), mine, strict=True):
            if work is None:
                work = Workbench(comparison)
            record = work.train(run)
            _append(comparison.results, record)
            report(run, record, left)


def _share_of(run: Run, count: int) -> int:
    return hashlib.sha256(json.dumps(asdict(run), sort_keys=True).encode()).digest()[0] % count


def _append(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(record) + "\n")


class Workbench:
    """Data, model and cached states, shared by the runs of one process."""

    def __init__(self, comparison: Comparison) -> None:
        # The same run in every process, whichever it makes first: its seed initialises the parameters of all.
        first = Run(comparison.table.reference, comparison.table.epsilons[0], comparison.table.protocol_rate, 0)
        prepared = prepare(comparison.config_of(first))
        self.prepared = prepared
        self.comparison = comparison
        self.caches = {
            name: prepared.prefix_cache(texts)
            for name, texts in (("train", prepared.train), ("validation", prepared.validation), ("test", prepared.test))
        }
        train = self.caches["train"]
        self.model: nn.Module = prepared.model.classifier if train is None else train.upper
        self.initial = {name: p.detach().clone() for name, p in trainable_parameters(self.model).items()}
        every = comparison.table.eval_records
        self.scheduled = spread(prepared.validation, every or len(prepared.validation))
        self._mixings: dict[str, MixingMatrix] = {}

    def train(self, run: Run) -> dict[str, Any]:
        """One run from the initial parameters: its line of the results file."""
        config = self.comparison.config_of(run)
        plan = self._plan(config)
        assert plan is not None
        prepared = replace(self.prepared, config=config, plan=plan, sampler=plan.sampler, steps=plan.steps)
        with torch.no_grad():
            for name, parameter in trainable_parameters(self.model).items():
                parameter.copy_(self.initial[name])
                parameter.grad = None
        denoiser = build_denoiser(config.denoising)
        optimizer, schedule = build_optimizer(self.model, config.optimizer, prepared.steps, denoiser)
        loss = prepared.loss()
        curve: list[tuple[int, float]] = []
        started = time.monotonic()
        with plan.start() as private:
            for step, indices in enumerate(private.batches()):
                total: ClippedSum | None = None
                for part in self._micro_batches(indices):
                    clipped = private.clip(self.model, loss, self._collate("train", part))
                    total = clipped if total is None else total + clipped
                assert total is not None
                noisy = private.release(total)
                schedule(step)
                step_on_release(optimizer, denoiser, self.model, noisy, plan.expected_batch_size)
                if (step + 1) % self.comparison.table.eval_every == 0 and step + 1 < plan.steps:
                    curve.append((step + 1, self._accuracy("validation", self.scheduled)))
        curve.append((plan.steps, self._accuracy("validation", np.arange(len(prepared.validation)))))
        return {
            **asdict(run),
            "key": self.comparison.key_of(run),
            "curve": curve,
            "test": self._accuracy("test", np.arange(len(prepared.test))),
            "noise_multiplier": plan.noise_multiplier,
            "steps": plan.steps,
            "seconds": round(time.monotonic() - started, 1),
        }

    def _plan(self, config: TrainConfig) -> PrivacyPlan | None:
        """The plan; a mixing matrix that an earlier run needed too is not found again."""
        tree = config.to_dict()
        tree["training"].pop("seed", None)  # all that a matrix can depend on, and more; not the seed
        settings = json.dumps([tree[table] for table in ("noise", "optimizer", "privacy", "clipping", "training")])
        check_spectrum(config, self.model, self.prepared.task.record_ids)
        plan = build_plan(config, self.prepared.task.record_ids, self._mixings.get(settings))
        if plan is not None and plan.mixing is not None:
            self._mixings[settings] = plan.mixing
        return plan

    def _records(self, part: str) -> Records:
        records: Records = getattr(self.prepared, part)
        return records

    def _collate(self, part: str, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        cache = self.caches[part]
        source: PrefixCache | Records = self._records(part) if cache is None else cache
        return source.collate(indices, self.prepared.device)

    def _micro_batches(self, indices: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        if not len(indices):
            yield indices  # an empty batch is a legal step
        yield from self.prepared.train.micro_batch_indices(
            indices, self.prepared.config.clipping.max_physical_batch_size
        )

    def _accuracy(self, part: str, records: NDArray[np.int64]) -> float:
        self.model.eval()
        right = 0
        with torch.no_grad(), precision_context(self.prepared.config, self.prepared.device):
            for indices in self._records(part).micro_batch_indices(records, EVALUATION_BATCH):
                batch = self._collate(part, indices)
                found = logits_of(self.model, batch).argmax(1)
                right += int((found == batch["labels"]).sum())
        self.model.train()
        return right / len(records)
