"""The report's figures, as SVG that takes its colours from the page: light, dark and printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from quietgrad.accounting import epsilon, trade_off
from quietgrad.report.run.facts import RunFacts
from quietgrad.report.svg import ATTACK, CLAIM, GRID, INK, STYLE, svg

POINTS = 24  # of the curve of privacy spent


def scores_figure(facts: RunFacts) -> str:
    """Scores of public records, and below them epsilon spent, against steps; "" without either."""
    scores = [(m["step"], m[k]) for m in facts.metrics if (k := _score_key(m))]
    spent = _spent(facts)
    if not scores and not spent:
        return ""
    with matplotlib.rc_context(STYLE):
        rows = bool(scores) + bool(spent)
        figure = Figure(figsize=(6.4, 2.3 * rows + 0.3), layout="constrained")
        axes = list(np.atleast_1d(figure.subplots(rows, 1, sharex=True)))
        if scores:
            axes[0].plot(*zip(*scores, strict=True), "o-", color=CLAIM, markersize=4)
            key = _score_key(facts.metrics[-1]) or "validation score"
            axes[0].set_ylabel(key.replace("_", " "))
        if spent:
            axes[-1].plot(*zip(*spent, strict=True), color=ATTACK)
            axes[-1].set_ylabel("epsilon spent")
            axes[-1].set_ylim(0, None)
        axes[-1].set_xlabel("step")
        for axis in axes:
            axis.grid(color=GRID, linewidth=0.6)
            axis.set_xlim(0, (facts.planned or facts.steps or 1) * 1.02)
        return svg(figure)


def trade_off_figure(facts: RunFacts) -> str:
    """The errors that no attacker can fall below, and those that an audit's attack made; "" where
    nothing was released.
    """
    if facts.event is None:
        return ""
    rates = np.concatenate([[0.0], np.geomspace(1e-4, 0.05, 41), np.linspace(0.05, 1.0, 61)[1:]])
    curve = trade_off(facts.event, rates)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 4.4), layout="constrained")
        axis = figure.add_subplot()
        axis.fill_between(rates, 0, curve, color=CLAIM, alpha=0.12, linewidth=0)
        axis.plot(rates, curve, color=CLAIM, label="no attacker errs less")
        axis.plot([0, 1], [1, 0], "--", color=INK, linewidth=0.8, label="guessing")
        _draw_audit(axis, () if facts.audit is None else facts.audit["points"])
        axis.set_xlim(0, 1)
        axis.set_ylim(0, 1)
        axis.set_xlabel("absent, called present")
        axis.set_ylabel("present, called absent")
        axis.grid(color=GRID, linewidth=0.6)
        axis.legend(frameon=False, loc="upper right")
        return svg(figure)


def _draw_audit(axis: Any, points: Sequence[Any]) -> None:
    for place, point in enumerate(points):
        (left, right), (low, high) = point["false_positive_limits"], point["false_negative_limits"]
        box = Rectangle((left, low), right - left, high - low, color=ATTACK, alpha=0.15)
        axis.add_patch(box)
        axis.plot(
            point["false_positive"],
            point["false_negative"],
            "o",
            color=ATTACK,
            markersize=4,
            label="the audit's attack" if not place else None,
        )


def _spent(facts: RunFacts) -> list[tuple[int, float]]:
    event, delta = facts.event, facts.delta
    if event is None or delta is None or not facts.private:
        return []
    steps = sorted({round(s) for s in np.linspace(0, facts.steps, POINTS + 1)} - {0})
    found = [(step, epsilon(event.after(step), delta)) for step in steps]
    return [(0, 0.0), *found] if np.isfinite([e for _, e in found]).all() else []


def _score_key(metrics: Any) -> str:
    words = (k for k in metrics if k.startswith("validation_") and k != "validation_records")
    return next(words, "")
