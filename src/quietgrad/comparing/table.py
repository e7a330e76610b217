"""What a comparison compares: its file, read and checked, and the configuration and the key of each
of its runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from quietgrad.accounting import RunCount
from quietgrad.checks import require_at_least
from quietgrad.comparing.early import (
    changed_by,
    parts_of,
    require_public,
    require_reference,
    require_varied,
)
from quietgrad.comparing.search import RATE, SearchTable, Settings, search_table
from quietgrad.records import Above0, Count, judge
from quietgrad.training.derived.resolve import is_open, with_what_trains
from quietgrad.training.settings.config import TrainConfig, config_from
from quietgrad.training.settings.reading import one

SHAPES = {"geometric": 1.0, "logarithmic": 0.0, "poisson": math.inf}
HEAD_RATE = "optimizer.head_learning_rate"


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
        head_rate: learning rate of the head as a multiple of the learning rate (0: the
            configuration's own, fixed).
        reference: the variant that the others are compared with.
        shares: of the reference's final accuracy, whose first crossing is counted in steps.
        eval_every, eval_records: steps between evaluations, validation records used for them (0:
            all).
        distinct: whether validation and test count equal inputs once: a message that many passed on
            would else decide the rate.
    """

    title: str = ""
    results: str = "results.jsonl"
    figure: str = "comparison.png"
    epsilons: list[Above0] = field(default_factory=lambda: [3.0])
    seeds: int = 3
    learning_rates: list[Above0] = field(default_factory=lambda: [1e-3])
    tuning_seeds: Count = 2
    protocol_rate: float = 1e-3
    head_rate: float = 0.0
    reference: str = "baseline"
    shares: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eval_every: int = 5
    eval_records: int = 0
    distinct: bool = False

    def __post_init__(self) -> None:
        judge(self)
        if self.protocol_rate not in self.learning_rates:
            raise ValueError(
                f"protocol_rate={self.protocol_rate} is not in "
                f"learning_rates={self.learning_rates}; add it to the grid"
            )
        few = "there are fewer seeds than tuning seeds"
        require_at_least("seeds", self.seeds, self.tuning_seeds, few)


@dataclass(frozen=True)
class AccountedTable:
    """How many runs ``quietgrad compare --accounted`` draws.

    Attributes:
        mean: expected number of runs.
        distribution: of their number; logarithmic costs least and is least even, poisson is most
            even, costs most, and may draw none.
    """

    mean: Above0 = 10.0
    distribution: Literal["geometric", "logarithmic", "poisson"] = "geometric"

    def __post_init__(self) -> None:
        judge(self)
        _ = self.count  # judges too

    @property
    def count(self) -> RunCount:
        return RunCount(self.mean, SHAPES[self.distribution])


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
        return {
            k: v
            for k, v in asdict(self).items()
            if not (k in ("settings", "trial") and self.trial is None)
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Run:
        settings = tuple((key, value) for key, value in record.get("settings", ()))
        which = {name: record[name] for name in ("variant", "epsilon", "rate", "seed")}
        return cls(**which, settings=settings, trial=record.get("trial"))


@dataclass(frozen=True)
class Comparison:
    """A configuration read from a file.

    Attributes:
        path: the file.
        table: what is compared.
        variants: name -> {"table.key": value} that the variant changes.
        base: nested dictionaries of the settings all runs share.
        search: what is searched; None for a grid.
        accounted: how many runs are drawn where the choice is paid for.
    """

    path: Path
    table: ComparisonTable
    variants: dict[str, dict[str, Any]]
    base: dict[str, Any]
    search: SearchTable | None = None
    accounted: AccountedTable = field(default_factory=AccountedTable)

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
        tree = changed_by(self.base, (*self.variants[run.variant].items(), *run.settings))
        optimizer = tree.setdefault("optimizer", {})
        optimizer["learning_rate"] = run.rate
        if self.table.head_rate:
            optimizer["head_learning_rate"] = run.rate * self.table.head_rate
        privacy = tree.setdefault("privacy", {})
        privacy["target_epsilon"] = run.epsilon
        privacy.pop("noise_multiplier", None)
        tree.setdefault("training", {})["seed"] = run.seed
        return with_what_trains(config_from(tree))

    def key_of(self, run: Run) -> str:
        """Changes with every setting that can change the outcome."""
        tree = self.config_of(run).to_dict()
        tree.pop("spectrum")  # training does not read it
        tree["data"].pop("public")  # a declaration, not a setting
        tree["training"].pop("hours")  # what is compared is said
        tree["training"].pop("tensorboard")  # of a run directory
        user, users = tree["data"].pop("user"), tree.pop("users")
        if user:  # as before there were users
            tree["users"] = users | {"user": user}
        # As before there were these tables and keys.
        for name in ("training_loss", "adaptive_clipping"):
            if tree[name] is None or tree[name].get("method") == "none":
                tree.pop(name)
        if not any(tree["schedules"].values()):
            tree.pop("schedules")
        if not tree["data"]["skip_bad"]:
            tree["data"].pop("skip_bad")
        if not tree["training"]["averaging"]:  # as before there were averages
            tree["training"].pop("averaging")
        if not tree["training"]["sharded"]:
            tree["training"].pop("sharded")
        settings: list[Any] = [tree, self.table.eval_every, self.table.eval_records]
        if self.table.distinct:
            settings.append("distinct")
        if self.search is not None:  # a trial is what it is by those before it
            settings.append(self.search.signature_of(run.variant))
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def load_comparison(path: str | Path, accounted: bool = False) -> Comparison:
    """Reads and checks a comparison.

    Args:
        path: its file.
        accounted: whether its choice is paid for, so that its records may be private.

    Raises:
        ValueError: missing or malformed file, unknown table or key, a variant or protocol that does
            not fit, naming it and the remedy.
    """
    file, parts = Path(path), parts_of(path)
    given, variants, tree = parts.comparison, parts.variants, parts.base
    table = one(ComparisonTable).read("comparison", given)
    search = None if parts.search is None else search_table(parts.search, list(variants))
    counted = one(AccountedTable).read("accounted", parts.accounted)
    if accounted:
        _require_accountable(table, search)
    if search is not None and ("learning_rates" in given or "protocol_rate" in given):
        raise ValueError(
            "comparison.learning_rates and protocol_rate are a grid, and [search] takes its place; "
            "keep one of the two"
        )
    require_reference(table.reference, variants)
    if search is not None and table.head_rate and any(r.key == HEAD_RATE for r in search.ranges):
        raise ValueError(
            f'comparison.head_rate and search.ranges."{HEAD_RATE}" both set the head\'s rate; keep '
            "one"
        )
    if not accounted:
        require_public(path, tree)
    found = Comparison(file, table, variants, tree, search, counted)
    for variant, changed in variants.items():
        ranges = search.ranges_of(variant) if search is not None else []
        named = [(f"variants.{variant}.{name}", name) for name in changed]
        for shown, name in named + [(f'search.ranges."{r.key}"', r.key) for r in ranges]:
            require_varied(shown, name)
        ends = {r.key: (*r.choices, *(() if r.choices else (r.low, r.high))) for r in ranges}
        least = {key: values[0] for key, values in ends.items()}
        # A proposal that no configuration takes would end the search each time it is started.
        others = [{key: value} for key, values in ends.items() for value in values[1:]]
        tried = [least, *(least | other for other in others)]
        for values in tried:
            settings = tuple((key, value) for key, value in values.items() if key != RATE)
            rate = float(values.get(RATE, table.protocol_rate))
            config = found.config_of(Run(variant, table.epsilons[0], rate, 0, settings))
        if is_open(config):
            raise ValueError(
                f"variants.{variant} leaves training.expected_batch_size or training.steps to be "
                "chosen by the rule of docs/defaults.md, and a comparison says what it compares: "
                "give both"
            )
        if not config.privacy.enabled:
            raise ValueError(
                "privacy.enabled=false: a comparison has an epsilon for every run; use `quietgrad "
                "train` for a reference without privacy"
            )
    return found


def _require_accountable(table: ComparisonTable, search: SearchTable | None) -> None:
    if search is not None:
        raise ValueError(
            "--accounted with [search]: each trial of a search depends on those before it, and "
            "what covers the choice are independent draws; list comparison.learning_rates and "
            "[variants.NAME] tables instead"
        )
    if len(table.epsilons) != 1:
        raise ValueError(
            f"comparison.epsilons={table.epsilons} with --accounted: one choice has one epsilon, "
            "of the whole; give one"
        )
