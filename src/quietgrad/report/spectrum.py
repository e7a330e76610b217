"""Figure of a spectrum: eigenvalues by rank, computed and extended (as NoiseCurve's figures 2 to
4).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from quietgrad.report.png import save_figure


def spectrum_figure(
    top: NDArray[np.float64], extended: NDArray[np.float64], title: str, path: str | Path
) -> None:
    """Draws computed and extended eigenvalues over their ranks, both axes logarithmic, to a PNG.

    Args:
        top: [k] computed, descending.
        extended: [p_plus], of which the first are the computed ones above the tail's end.
        title: of the figure.
        path: PNG file.
    """
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    ranks = np.arange(1, len(extended) + 1)
    axes.plot(
        ranks,
        extended,
        color="#1b6ca8",
        linewidth=1.5,
        label=f"fitted tail, to rank {len(extended):,}",
    )
    kept = top[top > 0]
    axes.plot(
        np.arange(1, len(kept) + 1),
        kept,
        "o",
        color="#c4541a",
        markersize=2.5,
        label=f"{len(kept)} computed (Lanczos)",
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rank of the eigenvalue")
    axes.set_ylabel("eigenvalue of the Hessian")
    axes.set_title(title)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(frameon=False)
    save_figure(figure, path, 150)
