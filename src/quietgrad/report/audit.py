"""Figure of an audit: the claimed trade-off curve, and the errors that the attack made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from quietgrad.accounting import trade_off
from quietgrad.events import PrivacyEvent
from quietgrad.report.png import save_figure

Interval = tuple[float, float]
GRID = 161
CLAIM, ATTACK = "#1f5fa8", "#c0504d"


def audit_figure(
    event: PrivacyEvent,
    points: Sequence[tuple[float, Interval, float, Interval]],
    title: str,
    boxes: str,
    path: str | Path,
) -> None:
    """Draws them to a PNG. Every attack on a mechanism that meets its claim lies on the curve or
    above it.

    Args:
        event: what is accounted for.
        points: (false positive rate, its limits, false negative rate, its limits), one a threshold.
        title: what was audited.
        boxes: what the limits are.
        path: PNG file.
    """
    # Points crowd at both ends of the curve.
    rates = np.concatenate(
        [[0.0], np.geomspace(1e-4, 0.05, GRID), np.linspace(0.05, 1.0, GRID)[1:]]
    )
    figure = Figure(figsize=(6.2, 5.6), layout="constrained")
    axes = figure.add_subplot()
    curve = trade_off(event, rates, "remove")
    axes.fill_between(
        rates,
        0,
        curve,
        color=CLAIM,
        alpha=0.10,
        linewidth=0,
        label="a box all in here refutes the claim",
    )
    axes.plot(rates, curve, color=CLAIM, label="claimed: no attack errs less")
    axes.plot([0, 1], [1, 0], "--", color="#888888", linewidth=0.9, label="guessing at random")
    for false_positive, (low, high), false_negative, (below, above) in points:
        axes.add_patch(
            Rectangle(
                (low, below),
                high - low,
                above - below,
                facecolor=ATTACK,
                alpha=0.15,
                edgecolor=ATTACK,
            )
        )
        axes.plot(false_positive, false_negative, "o", color=ATTACK, markersize=4)
    axes.plot([], [], "o", color=ATTACK, markersize=4, label=f"this attack ({boxes})")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("false positive rate: absent, called present")
    axes.set_ylabel("false negative rate: present, called absent")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path, 140)
