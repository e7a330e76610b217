"""A comparison's table and figure: accuracy at the end, steps to a share of the reference's
accuracy, differences seed by seed, with intervals.

Intervals are 95 % Student intervals over seeds. A variant is compared with the reference seed by
seed, since a seed fixes batches and noise for both.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import t as student_t

from quietgrad.report.png import save_figure

Curve = Sequence[tuple[int, float]]
COLOURS = ("#444444", "#c0504d", "#1f5fa8", "#3a7d44", "#8a5fa8", "#b8862b")


@dataclass(frozen=True)
class Series:
    """One variant at one epsilon and one learning rate.

    Attributes:
        rate: its learning rate.
        curves: seed -> (step, validation accuracy) pairs.
        tests: seed -> test accuracy at the end.
        settings: what else a search found for it, in words.
        metric: what the scores are, in words.
    """

    rate: float
    curves: Mapping[int, Curve]
    tests: Mapping[int, float]
    settings: str = ""
    metric: str = "accuracy"


@dataclass(frozen=True)
class Interval:
    """Mean and half width of the 95 % interval; the width is not a number for a single value."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        x = np.asarray(values, dtype=float)
        half = (
            float(student_t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / np.sqrt(len(x)))
            if len(x) > 1
            else float("nan")
        )
        return cls(float(x.mean()), half)

    def __format__(self, spec: str) -> str:
        width = spec.replace("+", "")
        return f"{self.mean:{spec}}" + (
            " (one seed)" if math.isnan(self.half) else f" ± {self.half:{width}}"
        )


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        variant, epsilon, rate, seeds: which runs.
        test, validation: accuracy at the end.
        difference: test accuracy minus the reference's, seed by seed; None for the reference.
        steps: first step whose mean validation accuracy reaches each share of the reference's at
            its end; None where it does not.
        speed_up: steps of the reference over the variant's, per share.
        settings: what else a search found.
    """

    variant: str
    epsilon: float
    rate: float
    seeds: int
    test: Interval
    validation: Interval
    difference: Interval | None
    steps: tuple[float | None, ...]
    speed_up: tuple[float | None, ...]
    settings: str = ""


def steps_to(curve: Curve, accuracy: float) -> float | None:
    """The first step at which a curve, straight between its points, reaches an accuracy."""
    previous: tuple[float, float] | None = None
    for step, value in curve:
        if value >= accuracy:
            if previous is None or value == previous[1]:
                return float(step)
            return previous[0] + (step - previous[0]) * (accuracy - previous[1]) / (
                value - previous[1]
            )
        previous = (step, value)
    return None


def mean_curve(series: Series) -> list[tuple[int, float]]:
    """Mean over seeds of validation accuracy, at the steps that all seeds have."""
    shared = set.intersection(*({s for s, _ in curve} for curve in series.curves.values()))
    by_seed = [dict(curve) for curve in series.curves.values()]
    return [(step, float(np.mean([c[step] for c in by_seed]))) for step in sorted(shared)]


def rows(
    chosen: Mapping[float, Mapping[str, Series]], reference: str, shares: Sequence[float]
) -> list[Row]:
    """The table of one protocol: epsilon -> variant -> runs; the reference first."""
    found = []
    for epsilon, variants in chosen.items():
        base = variants[reference]
        base_curve = mean_curve(base)
        goals = [share * base_curve[-1][1] for share in shares]
        base_steps = [steps_to(base_curve, goal) for goal in goals]
        for variant in [reference, *(v for v in variants if v != reference)]:
            series = variants[variant]
            steps = tuple(steps_to(mean_curve(series), goal) for goal in goals)
            paired = [
                series.tests[s] - base.tests[s]
                for s in sorted(series.tests.keys() & base.tests.keys())
            ]
            found.append(
                Row(
                    variant,
                    epsilon,
                    series.rate,
                    len(series.tests),
                    Interval.of(list(series.tests.values())),
                    Interval.of([curve[-1][1] for curve in series.curves.values()]),
                    None if variant == reference else Interval.of(paired),
                    steps,
                    tuple(
                        None if a is None or b is None else b / a
                        for a, b in zip(steps, base_steps, strict=True)
                    ),
                    series.settings,
                )
            )
    return found


def cells(
    table: Sequence[Row], shares: Sequence[float], metric: str = "accuracy"
) -> list[list[str]]:
    """The table as texts, the heads first."""
    rate = "learning rate" + (
        " and what else was found" if any(row.settings for row in table) else ""
    )
    heads = ["epsilon", "variant", rate, "seeds", f"test {metric}", "minus reference"]
    heads += [f"steps to {share:.0%}" for share in shares] + [
        f"speed-up {share:.0%}" for share in shares
    ]
    found = [heads]
    for row in table:
        rate = f"{row.rate:g}" + (f", {row.settings}" if row.settings else "")
        line = [f"{row.epsilon:g}", row.variant, rate, str(row.seeds), f"{row.test:.4f}"]
        line.append("" if row.difference is None else f"{row.difference:+.4f}")
        line += ["never" if s is None else f"{s:.0f}" for s in row.steps]
        line += [
            "" if row.difference is None else "-" if s is None else f"{s:.2f}" for s in row.speed_up
        ]
        found.append(line)
    return found


def markdown(table: Sequence[Row], shares: Sequence[float], metric: str = "accuracy") -> str:
    """The table for a document."""
    heads, *rows = cells(table, shares, metric)
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def comparison_figure(
    protocols: Mapping[str, Mapping[float, Mapping[str, Series]]],
    title: str,
    path: Path,
    end_apart: bool = False,
) -> None:
    """Validation accuracy against steps: a row a protocol, a column an epsilon; mean over seeds and
    95 % interval.

    Args:
        protocols: name -> epsilon -> variant -> runs.
        title: above all panels.
        path: PNG to write.
        end_apart: whether the last evaluation is on other records than those before it: a dot, not
            a piece of the line.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = max(len(p) for p in protocols.values())
    figure, axes = plt.subplots(
        len(protocols),
        columns,
        figsize=(4.2 * columns, 3.4 * len(protocols)),
        layout="constrained",
        squeeze=False,
        sharey="col",
    )
    for axis_row, (protocol, epsilons) in zip(axes, protocols.items(), strict=True):
        for axis, (epsilon, variants) in zip(axis_row, epsilons.items(), strict=False):
            for (variant, series), colour in zip(variants.items(), COLOURS * 3, strict=False):
                draw_series(axis, series, variant, colour, end_apart)
            axis.set_title(f"epsilon {epsilon:g}, {protocol}", fontsize=10)
            axis.set_xlabel("step (dots: on all validation records)" if end_apart else "step")
            axis.set_ylabel(f"validation {next(iter(variants.values())).metric}")
            axis.grid(alpha=0.25)
            axis.legend(fontsize=8, loc="lower right")
    figure.suptitle(textwrap.fill(title, 52 * columns), fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path, 130)
    plt.close(figure)


def draw_series(axis: object, series: Series, variant: str, colour: str, end_apart: bool) -> None:
    """One variant's mean over seeds and interval."""
    points = mean_curve(series)
    steps = [s for s, _ in points]
    by_seed = [dict(curve) for curve in series.curves.values()]
    intervals = [Interval.of([c[s] for c in by_seed]) for s in steps]
    means = np.array([i.mean for i in intervals])
    halves = np.nan_to_num(np.array([i.half for i in intervals]))
    if end_apart and len(steps) > 1:
        last = (steps[-1:], means[-1:], halves[-1:])
        axis.errorbar(*last, color=colour, fmt="o", markersize=3.5, elinewidth=1)  # type: ignore[attr-defined]
        steps, means, halves = steps[:-1], means[:-1], halves[:-1]
    axis.plot(steps, means, color=colour, linewidth=1.6, label=f"{variant} (rate {series.rate:g})")  # type: ignore[attr-defined]
    axis.fill_between(steps, means - halves, means + halves, color=colour, alpha=0.18, linewidth=0)  # type: ignore[attr-defined]
