"""Settings found by Optuna, with the same number of trials for every variant and epsilon
(as in NoiseCurve, appendix D.1: docs/noisecurve.md).

A study is one variant at one epsilon. Its next trial is a function of the trials before it and of
the seed alone, so a search stops and resumes anywhere.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quietgrad.checks import nearest
from quietgrad.records import Count, Whole, judge
from quietgrad.training.settings.reading import one

Value = int | float | str
Settings = tuple[tuple[str, Value], ...]
DIGITS = 3  # significant ones of a proposed number: enough, and a result's line stays readable
RATE = "optimizer.learning_rate"


@dataclass(frozen=True)
class Range:
    """Where one setting is looked for.

    Attributes:
        key: "table.key" of the configuration.
        low, high: bounds, both included; whole numbers where both are whole.
        log: uniform in the logarithm.
        choices: instead of bounds.
        variants: the variants that have this setting; empty: all.
    """

    key: str
    low: int | float = 0.0
    high: int | float = 0.0
    log: bool = False
    choices: tuple[Value, ...] = ()
    variants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        judge(self)
        ends = math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high
        if not self.choices and not (ends and (self.low > 0 or not self.log)):
            raise ValueError(
                f"low={self.low}, high={self.high}: a range must have low < high (and low > 0 with "
                "log = true), or choices"
            )


@dataclass(frozen=True)
class SearchTable:
    """What is searched.

    Attributes:
        trials: of every variant at every epsilon.
        startup: trials at random before the sampler (TPE) learns from those before.
        search_seed: of the proposals.
        ranges: one a setting.
    """

    trials: Count
    startup: Count = 4
    search_seed: Whole = 0
    ranges: tuple[Range, ...] = ()

    def __post_init__(self) -> None:
        judge(self)

    def ranges_of(self, variant: str) -> list[Range]:
        """Those shared by all variants first: random trials then agree on them."""
        mine = [r for r in self.ranges if not r.variants or variant in r.variants]
        return sorted(mine, key=lambda r: bool(r.variants))

    def signature_of(self, variant: str) -> str:
        """Of all that decides which settings of a variant are tried; not of how many are, nor of
        what other variants try.
        """
        ranges = [
            {k: v for k, v in asdict(r).items() if k != "variants"} for r in self.ranges_of(variant)
        ]
        text = json.dumps([self.startup, self.search_seed, ranges], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def search_table(values: dict[str, Any], variants: Sequence[str]) -> SearchTable:
    """The [search] table of a comparison: trials, startup, search_seed, and
    [search.ranges."table.key"].

    Raises:
        ValueError: for unknown keys, bounds that are none, or no range of the learning rate.
    """
    if not isinstance(values, dict) or not isinstance(values.get("ranges", {}), dict):
        raise ValueError(
            '[search] must be a table with trials and [search.ranges."table.key"] tables'
        )
    values = dict(values)
    values.setdefault("trials", 0)  # the last: a misspelt key is named before one that is missing
    ranges: dict[str, Any] = values.pop("ranges", {})
    table = one(SearchTable).read("search", values)
    if RATE not in ranges:
        raise ValueError(
            f'[search.ranges] has no "{RATE}"; variants compared at one rate are compared at the '
            "rate that suits one of them"
        )
    found = tuple(_range(key, value, variants) for key, value in ranges.items())
    if any(r.key == RATE and r.variants for r in found):
        raise ValueError(
            f'search.ranges."{RATE}".variants: every variant needs a rate of its own; leave '
            "variants out"
        )
    return replace(table, ranges=found)


def _range(key: str, values: Any, variants: Sequence[str]) -> Range:
    name = f'search.ranges."{key}"'
    if not isinstance(values, dict):
        raise ValueError(f"{name}={values!r} must be a table of low and high, or of choices")
    if "key" in values:
        raise ValueError(f"unknown key {name}.key: it is the name of this table; take it out")
    missing = {} if values.get("choices") else {"low": math.inf}  # bounds have no default
    found: Range = one(Range).read(name, {"key": key} | missing | values)
    for variant in found.variants:
        if variant not in variants:
            raise ValueError(
                f"{name}.variants names {variant!r}, which is no "
                f"variant{nearest(variant, variants)}"
            )
    return found


def propose(table: SearchTable, variant: str, trials: Sequence[tuple[Settings, float]]) -> Settings:
    """The settings of the next trial.

    Args:
        table: what is searched.
        variant: whose study.
        trials: settings and value (higher is better) of the trials before, in order.

    Raises:
        ValueError: without optuna, saying how to install it.
    """
    try:
        import optuna
    except ImportError as error:
        raise ValueError("a [search] needs optuna: pip install 'quietgrad[search]'") from error
    from optuna.distributions import (
        BaseDistribution,
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions: dict[str, BaseDistribution] = {}
    for r in table.ranges_of(variant):
        if r.choices:
            distributions[r.key] = CategoricalDistribution(r.choices)
        elif isinstance(r.low, int) and isinstance(r.high, int):
            distributions[r.key] = IntDistribution(r.low, r.high, log=r.log)
        else:
            distributions[r.key] = FloatDistribution(r.low, r.high, log=r.log)
    # A sampler of its own for each trial: what it proposes depends on the trials told, not on how
    # many were asked for in this process.
    sampler = optuna.samplers.TPESampler(
        seed=table.search_seed * 100_003 + len(trials),
        n_startup_trials=table.startup,
        multivariate=True,
    )
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for settings, value in trials:
        study.add_trial(
            optuna.trial.create_trial(
                params=dict(settings), distributions=distributions, value=value
            )
        )
    asked = study.ask(distributions)
    bounds = {r.key: r for r in table.ranges_of(variant)}
    return tuple((key, _rounded(value, bounds[key])) for key, value in sorted(asked.params.items()))


def _rounded(value: Value, bounds: Range) -> Value:
    if bounds.choices or not isinstance(value, float):
        return value
    return min(max(float(f"{value:.{DIGITS}g}"), bounds.low), bounds.high)
