"""Figure of a choice of bands: the noise that amplification leaves, what correlation makes of it,
and their product.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    LogLocator,
    NullLocator,
    ScalarFormatter,
    StrMethodFormatter,
)

from quietgrad.report.png import save_figure


def bands_figure(
    bands: Sequence[int],
    multipliers: Sequence[float],
    objectives: Sequence[float],
    chosen: int,
    path: str | Path,
) -> None:
    """Draws sigma(b)^2, tr(W X_b^-1) and their product, each relative to one band, to a PNG.

    Args:
        bands: candidates, 1 first.
        multipliers: sigma of each.
        objectives: tr(W X_b^-1) of each.
        chosen: the number of bands taken.
        path: PNG file.
    """
    noise = [(m / multipliers[0]) ** 2 for m in multipliers]
    mixing = [o / objectives[0] for o in objectives]
    error = [n * m for n, m in zip(noise, mixing, strict=True)]
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        bands,
        noise,
        "s--",
        color="#888888",
        markersize=4,
        label="noise variance (less amplification)",
    )
    axes.plot(
        bands,
        mixing,
        "^--",
        color="#1f5fa8",
        markersize=4,
        label="error at equal noise (better correlation)",
    )
    axes.plot(bands, error, "o-", color="#c0504d", label="predicted error: their product")
    axes.axvline(chosen, color="#c0504d", alpha=0.25, linewidth=6)
    axes.set_title(
        f"{chosen} bands chosen" if chosen > 1 else "independent noise chosen (one band)",
        fontsize=10,
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(bands)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("bands")
    axes.set_ylabel("relative to independent noise")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    save_figure(figure, path, 150)
